"""JSON answers: extraction from sentences and lists, with and without a response format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tools.tiny_model.data.example import Example, Turn
from tools.tiny_model.data.recall import filler

if TYPE_CHECKING:
    from tools.tiny_model.data.lexicon import Lexicon


def json_answer(lex: Lexicon, budget: int) -> Example:
    """A JSON object asked for in the prompt; every value stands in the prompt."""
    fields: dict[str, Any] = {}
    if lex.chance(0.35):
        fields = {"name": lex.name(), "age": int(lex.number(1, 2)), "city": lex.city()}
        if lex.chance(0.3):
            del fields[lex.rng.choice(list(fields))]
        said = {"name": "My name is {}.", "age": "I am {} years old.", "city": "I live in {}."}
        sentences = [said[key].format(value) for key, value in fields.items()]
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
    text = lex.pick(" ", "\n").join(sentences)
    keys = ", ".join(order)
    question = lex.pick(
        "Extract {k} as JSON: {t}", "Return a JSON object with the keys {k}. {t}", "{t}\n\nWrite this as JSON with keys {k}.",
        "{t}\n\nGive me {k} as a JSON object.", "Convert to JSON ({k}):\n{t}",
    ).format(k=keys, t=text)  # fmt: skip
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
