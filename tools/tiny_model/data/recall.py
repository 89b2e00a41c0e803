"""Finding things in a context: key-value lines, needles in filler, table cells, copying."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.tiny_model.data.example import Example, ask

if TYPE_CHECKING:
    from tools.tiny_model.data.lexicon import Lexicon

#: Characters per token of open-vocabulary text, on the safe side.
CHARS_PER_TOKEN = 1.9
#: The same of filler sentences.
FILLER_CHARS_PER_TOKEN = 3.0
_FILLER = (
    "The {a} near the {b} was {c} again.",
    "Every {a} in the town has a {b}.",
    "{n} likes the {a} more than the {b}.",
    "Nobody knows why the {a} is so {c}.",
    "We saw a {a} and a {b} on the way.",
    "In the morning {n} cleaned the {a}.",
    "It was a {c} day for the {a}.",
    "There are {k} {a} behind the {b}.",
    "{n} and {m} walked to the {a}.",
    "They talked about the {b} until {k}.",
)
_KV_AFTER = (
    "What is the value of {k}?",
    "What is {k}?",
    "Give me the value of {k}.",
    "Which value belongs to {k}?",
    "{k}?",
    "Look up {k}.",
    "Tell me the value for {k}.",
)
_NEEDLES = (
    ("The secret code of {k} is {v}.", "What is the secret code of {k}?"),
    ("The phone number of {k} is {v}.", "What is the phone number of {k}?"),
    ("The password for {k} is {v}.", "What is the password for {k}?"),
    ("{k} lives in {v}.", "Where does {k} live?"),
    ("The favourite word of {k} is {v}.", "What is the favourite word of {k}?"),
    ("{k} has the number {v}.", "Which number does {k} have?"),
    ("The key of {k} is {v}.", "What is the key of {k}?"),
)

_COLUMNS = (
    "price", "colour", "color", "size", "weight", "age", "city", "country", "count", "stock", "year", "type", "height",
    "score", "points", "date", "email", "phone", "status", "role", "team", "owner", "value", "amount", "total", "unit",
)  # fmt: skip


def key_value(lex: Lexicon, budget: int, *, open_only: bool = False) -> Example:
    """Lines `key: value`; one value is asked for, the question stands before or after.

    `open_only`: no value is a plain number, so that every value is a string of the split.
    """
    separator = lex.pick(": ", ": ", ": ", " = ", " -> ")
    pairs: dict[str, str] = {}
    room = budget * CHARS_PER_TOKEN
    while room > 0 or len(pairs) < 2:
        key, value = lex.key(), lex.text_value() if open_only else lex.value()
        if key not in pairs:
            pairs[key] = value
            room -= len(key) + len(value) + 4
    wanted = lex.rng.choice(list(pairs))
    lines = "\n".join(f"{key}{separator}{value}" for key, value in pairs.items())
    question = lex.pick(*_KV_AFTER).format(k=wanted)
    text = f"{question}\n\n{lines}" if lex.chance(0.25) else f"{lines}\n\n{question}"
    return ask("key-value", text, pairs[wanted], f"{wanted}{separator}{pairs[wanted]}")


def needle(lex: Lexicon, budget: int) -> Example:
    """One to three facts among filler sentences."""
    kind = lex.rng.choice(_NEEDLES)
    is_word = "live" in kind[1] or "word" in kind[1]
    facts = {}
    for key in lex.distinct(lex.city, lex.rng.randint(1, 3)):
        facts[key] = (
            (lex.name() if "live" in kind[1] else lex.word()) if is_word else lex.value_code()
        )
    sentences: list[str] = []
    room = budget * FILLER_CHARS_PER_TOKEN
    while room > 0 or len(sentences) < 2:
        sentences.append(filler(lex))
        room -= len(sentences[-1])
    for key, value in facts.items():
        sentences.insert(lex.rng.randint(0, len(sentences)), kind[0].format(k=key, v=value))
    wanted = lex.rng.choice(list(facts))
    question = kind[1].format(k=wanted)
    text = " ".join(sentences)
    text = f"{question}\n\n{text}" if lex.chance(0.15) else f"{text}\n\n{question}"
    return ask("needle", text, facts[wanted], kind[0].format(k=wanted, v=facts[wanted]))


def filler(lex: Lexicon) -> str:
    """A sentence without a fact that anybody asks for."""
    return lex.pick(*_FILLER).format(
        a=lex.word(),
        b=lex.english(),
        c=lex.english(),
        n=lex.name(),
        m=lex.name(),
        k=lex.number(1, 2),
    )


def table(lex: Lexicon, budget: int) -> Example:
    """A Markdown table; one cell is asked for."""
    common = lex.chance(0.35)
    columns = lex.distinct(
        (lambda: lex.rng.choice(_COLUMNS)) if common else lex.word, lex.rng.randint(2, 4)
    )
    count = max(2, min(12, int(budget / (4 + 4 * len(columns)))))
    rows = lex.distinct(lex.name if lex.chance(0.5) else lex.word, lex.rng.randint(2, count))
    cells = {
        (row, column): lex.number(1, 4) if lex.chance(0.7) else lex.word()
        for row in rows
        for column in columns
    }
    head = lex.pick("name", "item", "city", "id")
    lines = [f"| {head} | {' | '.join(columns)} |", "|" + " --- |" * (len(columns) + 1)]
    lines += [f"| {row} | {' | '.join(cells[row, column] for column in columns)} |" for row in rows]
    row, column = lex.rng.choice(rows), lex.rng.choice(columns)
    question = lex.pick(
        "What is the {c} of {r}?",
        "What is in column {c} of row {r}?",
        "Give the {c} for {r}.",
        "{r}: {c}?",
    ).format(c=column, r=row)
    body = "\n".join(lines)
    text = f"{question}\n\n{body}" if lex.chance(0.2) else f"{body}\n\n{question}"
    order = ", ".join(f"{name} {cells[row, name]}" for name in columns)
    return ask(
        "table",
        text,
        cells[row, column],
        f"Row {row}: {order}. {column}: {cells[row, column]}",
        needs_reason=True,
    )


def copy(lex: Lexicon, budget: int, *, open_only: bool = False) -> Example:
    """Repeat a text exactly, or one part of it (`open_only`: no plain numbers, no fixed sentences)."""
    kind = lex.rng.random()
    value = lex.text_value if open_only else lex.value
    if kind < 0.45:
        text = " ".join(value() for _ in range(lex.rng.randint(1, min(8, 2 + budget // 30))))
    elif kind < 0.55 and not open_only:
        text = filler(lex)
    elif kind < 0.72:
        text = lex.sentence()
    elif kind < 0.8 and not open_only:
        text = lex.phrase()
    else:
        text = value()
    wrap = lex.pick("{t}", '"{t}"', "'{t}'", "\n{t}")
    question = lex.pick(
        "Repeat this: {t}", "Copy the following text exactly: {t}", "Say {t}", "Write {t}",
        "Echo: {t}", "Please repeat after me: {t}", "Return exactly this text: {t}", "Print {t} and nothing else",
        "Please say {t}", "Say: {t}", "Write: {t}", "Repeat after me: {t}",
    )  # fmt: skip
    return ask("copy", question.format(t=wrap.format(t=text)), text, "I copy the text.")
