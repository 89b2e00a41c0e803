"""JSON answers: extraction from sentences and lists, with and without a response format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tools.tiny_model.data.example import Example, Turn
from tools.tiny_model.data.recall import filler

if TYPE_CHECKING:
    from tools.tiny_model.data.lexicon import Lexicon


def _person(lex: Lexicon, fields: dict[str, Any]) -> list[str]:
    """What is said about a person, in the first or third person."""
    if "name" not in fields or lex.chance(0.5):
        said = {"name": "My name is {}.", "age": "I am {} years old.", "city": "I live in {}."}
        return [said[key].format(value) for key, value in fields.items()]
    name = fields["name"]
    age, city = fields.get("age"), fields.get("city")
    if age is None:
        return [lex.pick(f"{name} lives in {city}.", f"{name} is from {city}.", f"{name}, {city}")]
    if city is None:
        return [lex.pick(f"{name} is {age} years old.", f"{name}, {age}", f"{name} is {age}.")]
    return [
        lex.pick(
            f"{name} is {age} years old and lives in {city}.",
            f"{name} from {city} is {age} years old.",
            f"{name} lives in {city} and is {age}.",
            f"{name}, {age}, {city}",
        )
    ]


def _spoken(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def json_answer(lex: Lexicon, budget: int) -> Example:
    """A JSON object asked for in the prompt; every value stands in the prompt."""
    fields: dict[str, Any] = {}
    delimiters: tuple[str, ...] = (" ", "\n")
    if lex.chance(0.35):
        fields = {"name": lex.name(), "age": int(lex.number(1, 2)), "city": lex.city()}
        if lex.chance(0.3):
            del fields[lex.rng.choice(list(fields))]
        sentences = _person(lex, fields)
    else:
        for key in lex.distinct(
            lex.word if lex.chance(0.7) else lex.identifier, lex.rng.randint(1, 4)
        ):
            kind = lex.rng.random()
            fields[key] = (
                int(lex.number(1, 5))
                if kind < 0.4
                else lex.chance(0.5)
                if kind < 0.5
                else lex.text_value()
            )
        style = lex.rng.randrange(4)
        delimiters = (" ", "\n") if style == 0 else ("\n", "\n", ", ")
        shape = ("The {} is {}.", "{}: {}", "{} = {}", "{} {}")[style]
        sentences = [
            shape.format(key, json.dumps(value) if isinstance(value, bool) else value)
            for key, value in fields.items()
        ]
    order = list(fields)
    if lex.chance(0.3):
        for _ in range(max(1, budget // 60)):
            sentences.insert(lex.rng.randint(0, len(sentences)), filler(lex))
    elif lex.chance(0.3):
        lex.rng.shuffle(order)
    text = lex.pick(*delimiters).join(sentences)
    keys = ", ".join(order)
    if len(order) > 1 and lex.chance(0.3):
        keys = f"{', '.join(order[:-1])} and {order[-1]}"
    question = lex.pick(
        "Extract {k} as JSON: {t}", "Return a JSON object with the keys {k}. {t}", "{t}\n\nWrite this as JSON with keys {k}.",
        "{t}\n\nGive me {k} as a JSON object.", "Convert to JSON ({k}):\n{t}",
    ).format(k=keys, t=text)  # fmt: skip
    if lex.chance(0.15):
        pairs = [f"{key} {_spoken(fields[key])}" for key in order]
        said = f"{', '.join(pairs[:-1])} and {pairs[-1]}" if len(pairs) > 1 else pairs[0]
        question = lex.pick(
            "Give me a JSON object with {p}.", "Write a JSON object with {p}", "Return JSON with {p}.", "JSON with {p}",
        ).format(p=said)  # fmt: skip
    answer = json.dumps({key: fields[key] for key in order}, ensure_ascii=False)
    response: Any = None
    kind = lex.rng.random()
    if kind < 0.3:
        response = "json_object"
    elif kind < 0.45:
        types = {
            key: "boolean"
            if isinstance(fields[key], bool)
            else "integer"
            if isinstance(fields[key], int)
            else "string"
            for key in order
        }
        response = {
            "type": "object",
            "properties": {key: {"type": types[key]} for key in order},
            "required": order,
        }
    return Example(
        "json", [Turn("user", question)], answer, f"The keys are {keys}.", response=response
    )
