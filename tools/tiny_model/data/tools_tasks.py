"""Tool calls: well-known tools, and tools drawn at random with their schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.tiny_model.data.example import Call, Example, Tool, Turn

if TYPE_CHECKING:
    from tools.tiny_model.data.lexicon import Lexicon

_VERBS = [
    "get",
    "find",
    "set",
    "send",
    "create",
    "delete",
    "update",
    "list",
    "search",
    "open",
    "close",
    "start",
    "stop",
    "add",
    "remove",
    "check",
    "read",
    "write",
    "book",
    "show",
]
_KNOWN = (
    ("get_weather", "Get the weather of a city.", {"city": "city"}, ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?")),
    ("get_current_weather", "Get the current weather in a given location.", {"location": "city", "unit": "unit"}, ("What is the weather in {location} in {unit}?", "Current weather in {location}, {unit} please.")),
    ("get_time", "Get the time in a city.", {"city": "city"}, ("What time is it in {city}?", "Time in {city}?")),
    ("calculate", "Evaluate an expression.", {"expression": "expression"}, ("Use the calculator: {expression}", "Calculate {expression} with the tool.")),
    ("send_email", "Send a mail.", {"to": "mail", "subject": "words"}, ("Send a mail to {to} with subject {subject}.", "Mail {to}: subject {subject}")),
    ("search", "Search the web.", {"query": "words"}, ("Search for {query}.", "Search the web for {query}")),
    ("set_alarm", "Set an alarm.", {"hour": "hour", "minute": "minute"}, ("Set an alarm for hour {hour}, minute {minute}.",)),
    ("convert_currency", "Convert money.", {"amount": "integer", "source": "currency", "target": "currency"}, ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?")),
)  # fmt: skip
_ENUMS = {"unit": ("celsius", "fahrenheit"), "currency": ("USD", "EUR", "JPY", "GBP", "CHF", "CNY")}
_REFUSAL = "I can answer that without a tool: "


def _draw(lex: Lexicon, kind: str) -> Any:
    """A value of a kind of parameter."""
    rng = lex.rng
    if kind in _ENUMS:
        return rng.choice(_ENUMS[kind])
    makers: dict[str, Any] = {
        "city": lex.city,
        "expression": lambda: f"{lex.number(1, 3)} {rng.choice('+-*')} {lex.number(1, 3)}",
        "mail": lambda: f"{lex.word()}@{lex.word()}.com",
        "words": lambda: " ".join(lex.word() for _ in range(rng.randint(1, 3))),
        "hour": lambda: rng.randrange(24),
        "minute": lambda: rng.randrange(60),
        "integer": lambda: int(lex.number(1, 4)),
        "number": lambda: float(f"{lex.number(1, 2)}.{rng.randint(1, 9)}"),
        "boolean": lambda: rng.random() < 0.5,
        "string": lex.text_value,
        "array": lambda: [lex.word() for _ in range(rng.randint(1, 3))],
    }
    return makers[kind]()


def _schema(lex: Lexicon, kind: str, name: str) -> dict[str, Any]:
    json_type = {"hour": "integer", "minute": "integer"}.get(
        kind, kind if kind in ("integer", "number", "boolean", "array") else "string"
    )
    schema: dict[str, Any] = {"type": json_type}
    if kind == "array":
        schema["items"] = {"type": "string"}
    if kind in _ENUMS:
        schema["enum"] = list(_ENUMS[kind])
    if lex.chance(0.3):
        schema["description"] = f"The {name}."
    return schema


def _known(lex: Lexicon) -> tuple[Tool, str, dict[str, Any]]:
    """A well-known tool, a request for it and its arguments."""
    name, description, kinds, requests = lex.rng.choice(_KNOWN)
    values = {parameter: _draw(lex, kind) for parameter, kind in kinds.items()}
    tool = Tool(
        name, description, _parameters({p: _schema(lex, kind, p) for p, kind in kinds.items()})
    )
    return tool, lex.rng.choice(requests).format(**values), values


def _unseen(lex: Lexicon) -> tuple[Tool, str, dict[str, Any]]:
    """A tool of random words; the request is built from its name and parameters."""
    verb, noun = lex.rng.choice(_VERBS), lex.word()
    name = lex.pick(
        f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}"
    )
    kinds = {
        parameter: lex.rng.choice(
            ("string", "string", "string", "integer", "integer", "boolean", "number", "array")
        )
        for parameter in lex.distinct(
            lex.word if lex.chance(0.7) else lex.identifier, lex.rng.randint(1, 4)
        )
    }
    values = {parameter: _draw(lex, kind) for parameter, kind in kinds.items()}
    shown = {p: _shown(value) for p, value in values.items()}
    style = lex.rng.randrange(4)
    if style == 0:
        parts = ", ".join(f"{p} {v}" for p, v in shown.items())
        request = f"{verb.capitalize()} the {noun} with {parts}."
    elif style == 1:
        request = f"{verb.capitalize()} {noun}: " + ", ".join(
            f"{p} = {v}" for p, v in shown.items()
        )
    elif style == 2:
        request = f"Please {verb} a {noun}. " + " ".join(
            f"The {p} is {v}." for p, v in shown.items()
        )
    else:
        request = f"Call {name} with " + " and ".join(f"{p} {v}" for p, v in shown.items())
    description = lex.pick(
        f"{verb.capitalize()} a {noun}.",
        f"Use this to {verb} the {noun}.",
        f"{verb.capitalize()} {noun}",
    )
    return (
        Tool(
            name, description, _parameters({p: _schema(lex, kind, p) for p, kind in kinds.items()})
        ),
        request,
        values,
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _parameters(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def tool_call(lex: Lexicon, _budget: int, *, known: bool | None = None) -> Example:
    """Choose a tool and copy its arguments; report a result; or answer without any tool."""
    is_known = lex.chance(0.35) if known is None else known
    make = _known if is_known else _unseen
    tool, request, values = make(lex)
    others = [
        (_known if lex.chance(0.4) else _unseen)(lex)[0]
        for _ in range(lex.rng.choice((0, 0, 1, 1, 2, 3)))
    ]
    tools = [tool, *(other for other in others if other.name != tool.name)]
    lex.rng.shuffle(tools)
    task = "tools-known" if is_known else "tools-unseen"
    call = Call(tool.name, values)
    reason = f"I call {tool.name}."
    kind = lex.rng.random()
    if kind < 0.2 and known is None:
        result = lex.pick(_result(lex), lex.value(), f"{lex.word()} {lex.number(1, 3)}")
        turns = [Turn("user", request), Turn("assistant", "", [call], reason), Turn("tool", result)]
        return Example(
            "tools-result",
            turns,
            f"The result of {tool.name} is: {result}",
            "I report the result.",
            tools=tools,
        )
    if kind < 0.3 and known is None:
        question, answer = lex.rng.choice(
            (
                ("Hello!", "Hello! How can I help you?"),
                ("Thank you!", "You are welcome."),
                (
                    "Who are you?",
                    "I am dsserve-tiny, a very small language model of the DeepSeek-V4.1 architecture.",
                ),
            )
        )
        return Example(
            "tools-none", [Turn("user", question)], answer, "No tool is needed.", tools=tools
        )
    return Example(task, [Turn("user", request)], "", reason, calls=[call], tools=tools)


def _result(lex: Lexicon) -> str:
    return f'{{"{lex.word()}": "{lex.word()}", "{lex.word()}": {lex.number(1, 3)}}}'
