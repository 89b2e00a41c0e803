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
    ("book_flight", "Book a flight.", {"destination": "city", "seats": "small"}, ("Book a flight to {destination} with {seats} seats.", "Book {seats} seats to {destination}.", "I need a flight to {destination} for {seats} people.", "Please book a flight to {destination}, {seats} seats.")),
    ("book_table", "Book a table in a restaurant.", {"restaurant": "city", "people": "small", "time": "clock"}, ("Book a table at {restaurant} for {people} people at {time}.", "Reserve a table for {people} at {restaurant}, {time}.")),
    ("play_music", "Play a song.", {"song": "words"}, ("Play {song}.", "Play the song {song}", "I want to hear {song}.")),
    ("translate", "Translate a text.", {"text": "words", "language": "language"}, ("Translate {text} to {language} with the tool.", "Translate '{text}' into {language}.", "Use the tool to translate {text} to {language}.")),
    ("create_event", "Create an event in the calendar.", {"title": "words", "date": "date"}, ("Create an event {title} on {date}.", "Add {title} to my calendar on {date}.")),
    ("get_stock_price", "Get the price of a stock.", {"symbol": "symbol"}, ("What is the stock price of {symbol}?", "Stock price of {symbol}?", "How much is a share of {symbol}?")),
    ("add_numbers", "Add two numbers.", {"a": "integer", "b": "integer"}, ("Add {a} and {b} with the tool.", "Use the tool to add {a} and {b}.", "Add the numbers {a} and {b}.")),
    ("add", "Add two numbers.", {"a": "integer", "b": "integer"}, ("Add {a} and {b} with the tool.", "Use the tool to add {a} and {b}.", "Add {a} and {b}.")),
    ("send_message", "Send a message to a person.", {"recipient": "name", "text": "words"}, ("Send {recipient} the message {text}.", "Tell {recipient}: {text}", "Write to {recipient}: {text}")),
    ("find_restaurant", "Find a restaurant.", {"city": "city", "cuisine": "cuisine"}, ("Find a {cuisine} restaurant in {city}.", "Where can I eat {cuisine} food in {city}?")),
    ("set_timer", "Set a timer.", {"minutes": "minute"}, ("Set a timer for {minutes} minutes.", "Timer: {minutes} minutes", "Wake me in {minutes} minutes.")),
    ("read_file", "Read a file.", {"path": "path"}, ("Read the file {path}.", "Show me {path}.", "What is in {path}?", "Open {path}")),
    ("list_files", "List the files of a directory.", {"directory": "path"}, ("List the files in {directory}.", "Which files are in {directory}?")),
    ("run_command", "Run a shell command.", {"command": "words"}, ("Run the command {command}.", "Execute {command}", "Run {command}")),
    ("open_url", "Open a web page.", {"url": "url"}, ("Open {url}.", "Go to {url}", "Visit the page {url}.")),
    ("turn_on_light", "Turn on the light of a room.", {"room": "word"}, ("Turn on the light in the {room}.", "Light on in the {room}, please.")),
    ("get_user", "Get a user by id.", {"user_id": "integer"}, ("Get user {user_id}.", "Who is user {user_id}?", "Show me the user with the id {user_id}.")),
    ("create_user", "Create a user.", {"name": "name", "age": "age"}, ("Create a user {name}, {age} years old.", "Add the user {name} with age {age}.")),
    ("convert_currency", "Convert money.", {"amount": "integer", "source": "currency", "target": "currency"}, ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?")),
)  # fmt: skip
_ENUMS = {
    "unit": ("celsius", "fahrenheit"),
    "currency": ("USD", "EUR", "JPY", "GBP", "CHF", "CNY"),
    "language": ("French", "German", "Spanish", "Chinese", "Italian", "Japanese"),
    "cuisine": ("Italian", "Chinese", "French", "Indian", "Greek", "Mexican"),
}
_INTEGERS = ("hour", "minute", "small", "age")
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
        "word": lex.word,
        "name": lex.name,
        "small": lambda: rng.randint(1, 12),
        "age": lambda: rng.randint(1, 99),
        "clock": lambda: f"{rng.randrange(24)}:{rng.choice(('00', '15', '30', '45'))}",
        "date": lambda: (
            f"{rng.randint(2000, 2040)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        ),
        "symbol": lambda: lex.word()[:4].upper(),
        "path": lambda: (
            rng.choice(("", "/"))
            + "/".join(lex.word() for _ in range(rng.randint(1, 3)))
            + rng.choice(("", ".txt", ".csv", ".py"))
        ),
        "url": lambda: f"https://{lex.word()}.{rng.choice(('com', 'org', 'net'))}",
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
    json_type = "string"
    if kind in _INTEGERS:
        json_type = "integer"
    elif kind in ("integer", "number", "boolean", "array"):
        json_type = kind
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
    style = lex.rng.randrange(6)
    if style >= 4:
        request = _natural(lex, verb, noun, shown)
    elif style == 0:
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


def _natural(lex: Lexicon, verb: str, noun: str, shown: dict[str, str]) -> str:
    """A request that does not name the first parameter: its value alone, the others beside their names."""
    names = list(shown)
    lead = lex.pick(
        "{v} the {n} {x}", "{v} a {n} for {x}", "{v} {n} {x}", "Please {v} the {n} {x}", "I want to {v} a {n} for {x}",
        "Can you {v} the {n} {x}",
    ).format(v=verb, n=noun, x=shown[names[0]])  # fmt: skip
    lead = lead[0].upper() + lead[1:]
    rest = [
        lex.pick("{p} {x}", "{p} = {x}", "the {p} is {x}").format(p=p, x=shown[p])
        for p in names[1:]
    ]
    text = (
        ", ".join((lead, *rest))
        if lex.chance(0.5)
        else " with ".join((lead, " and ".join(rest)))
        if rest
        else lead
    )
    return text + ("?" if lead.startswith("Can") else lex.pick(".", ""))


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
    tools = [tool, *{other.name: other for other in others if other.name != tool.name}.values()]
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
