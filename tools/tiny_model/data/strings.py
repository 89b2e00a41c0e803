"""String tasks: spelling, reversing, case, counting letters, sorting, picking items of a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.tiny_model.data.example import Example, ask

if TYPE_CHECKING:
    from tools.tiny_model.data.lexicon import Lexicon

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def strings(lex: Lexicon, budget: int) -> Example:
    """One of the string tasks."""
    make = lex.rng.choice(
        (
            _reverse,
            _reverse,
            _case,
            _case,
            _letters,
            _length,
            sort,
            sort,
            sort,
            sort,
            _pick,
            _reverse_list,
            _spell,
            _spell,
            _glue,
            _join,
        )
    )
    return make(lex, budget)


def _short(lex: Lexicon) -> str:
    """A word of at most ten letters."""
    while True:
        word = lex.spelled() if lex.chance(0.85) else lex.name()
        if len(word) <= 10:
            return word


def _reverse(lex: Lexicon, _budget: int) -> Example:
    word = _short(lex)
    question = lex.pick(
        "Reverse the word {w}.",
        "Write {w} backwards.",
        "Spell {w} backwards.",
        "Reverse: {w}",
        'Reverse the string "{w}".',
    )
    backwards = word[::-1]
    reason = f"{' '.join(word)} -> {' '.join(backwards)}"
    return ask("strings", question.format(w=word), backwards, reason, needs_reason=True)


def _spell(lex: Lexicon, _budget: int) -> Example:
    word = _short(lex)
    question = lex.pick(
        "Spell the word {w}.", "Spell {w} letter by letter.", "What are the letters of {w}?"
    ).format(w=word)
    return ask("strings", question, "-".join(word), f"The word is {word}.")


def _glue(lex: Lexicon, _budget: int) -> Example:
    word = _short(lex)
    word = lex.rng.choice((word, word.upper(), word[::-1]))
    spaced = lex.pick(" ", "-").join(word)
    question = lex.pick(
        "Write as one word: {s}", "Put these letters together: {s}", "Which word is {s}?"
    ).format(s=spaced)
    return ask("strings", question, word, f"The letters are {' '.join(word)}.")


def _case(lex: Lexicon, _budget: int) -> Example:
    text = " ".join(_short(lex) for _ in range(lex.rng.randint(1, 4)))
    if lex.chance(0.15):
        text = lex.phrase()
    kind = lex.rng.randrange(3)
    target = ("upper case", "lower case", "title case")[kind]
    if kind == 1:
        text = text.upper() if lex.chance(0.5) else text.title()
    changed = (text.upper(), text.lower(), text.title())[kind]
    question = lex.pick(
        "Write {t} in {c}.",
        "Convert to {c}: {t}",
        "Change this to {c}: {t}",
        "Put {t} into {c}",
        "Write {t} in {c}",
        "Convert {t} to {c}.",
        "{t} in {c}",
    )
    spelled = ", ".join(" ".join(word) for word in changed.split())
    return ask(
        "strings",
        question.format(t=text, c=target),
        changed,
        f"{target}: {spelled}",
        needs_reason=True,
    )


def _letters(lex: Lexicon, _budget: int) -> Example:
    word = _short(lex)
    letter = (
        lex.rng.choice(word.lower())
        if lex.chance(0.8)
        else lex.rng.choice("abcdefghijklmnopqrstuvwxyz")
    )
    question = lex.pick(
        "How many letters {l} are in {w}?",
        "How often does the letter {l} occur in {w}?",
        "Count the letter {l} in the word {w}.",
        "How many {l}'s are in {w}?",
    )
    count, parts = 0, []
    for character in word.lower():
        if character == letter:
            count += 1
            parts.append(f"{character}{count}")
        else:
            parts.append(character)
    return ask(
        "strings", question.format(l=letter, w=word), str(count), " ".join(parts), needs_reason=True
    )


def _length(lex: Lexicon, _budget: int) -> Example:
    word = _short(lex)
    question = lex.pick(
        "How many letters does {w} have?",
        "How long is the word {w}?",
        "Count the letters of {w}.",
        "How many letters are in {w}?",
        "How many letters are there in the word {w}?",
        "How many characters does {w} have?",
    )
    reason = " ".join(f"{character}{i}" for i, character in enumerate(word, 1))
    return ask("strings", question.format(w=word), str(len(word)), reason, needs_reason=True)


def sort(lex: Lexicon, _budget: int) -> Example:
    """Numbers by size, words by the alphabet."""
    if lex.chance(0.4):
        numbers = [
            int(text) for text in lex.distinct(lambda: lex.number(1, 3), lex.rng.randint(3, 6))
        ]
        down = lex.chance(0.25)
        ordered = sorted(numbers, reverse=down)
        question = lex.pick(
            "Sort these numbers{o}: {l}", "Put these numbers in order{o}: {l}"
        ).format(o=" from large to small" if down else "", l=", ".join(map(str, numbers)))
        longest = max(len(str(number)) for number in numbers)
        groups = [
            f"{size} digits: {' '.join(str(n) for n in ordered if len(str(n)) == size)}"
            for size in range(1, longest + 1)
            if any(len(str(n)) == size for n in ordered)
        ]
        return ask(
            "sort",
            question,
            ", ".join(map(str, ordered)),
            "; ".join(reversed(groups) if down else groups),
            needs_reason=True,
        )
    words: dict[str, str] = {}
    while len(words) < 3 or (len(words) < 6 and lex.chance(0.6)):
        word = _short(lex).lower()
        words.setdefault(word[0], word)
    items = list(words.values())
    lex.rng.shuffle(items)
    question = lex.pick(
        "Sort these words: {l}",
        "Sort alphabetically: {l}",
        "Put these words in alphabetical order: {l}",
    ).format(l=", ".join(items))
    ordered_words = sorted(items)
    return ask(
        "sort",
        question,
        ", ".join(ordered_words),
        f"{', '.join(f'{word[0]} {word}' for word in items)}. Order: {' '.join(word[0] for word in ordered_words)}",
        needs_reason=True,
    )


def _pick(lex: Lexicon, _budget: int) -> Example:
    items = lex.distinct(lex.item, lex.rng.randint(3, 7))
    kind = lex.rng.random()
    if kind < 0.3:
        where, answer = "last", items[-1]
    else:
        index = lex.rng.randrange(min(len(items), 6))
        where, answer = _ORDINALS[index], items[index]
    question = lex.pick(
        "What is the {w} item: {l}",
        "Which word is the {w} one in this list? {l}",
        "Name the {w} element of: {l}",
    )
    reason = " ".join(f"{i} {item}" for i, item in enumerate(items, 1))
    return ask("strings", question.format(w=where, l=", ".join(items)), answer, reason)


def _reverse_list(lex: Lexicon, _budget: int) -> Example:
    items = lex.distinct(lex.item, lex.rng.randint(2, 6))
    question = lex.pick("Reverse this list: {l}", "Write this list in reverse order: {l}").format(
        l=", ".join(items)
    )
    return ask("strings", question, ", ".join(reversed(items)), f"The last one is {items[-1]}.")


def _join(lex: Lexicon, _budget: int) -> Example:
    items = lex.distinct(lex.item, lex.rng.randint(2, 6))
    sign, name = lex.rng.choice(
        (
            ("-", "hyphens"),
            ("_", "underscores"),
            (" ", "spaces"),
            (";", "semicolons"),
            ("/", "slashes"),
        )
    )
    question = lex.pick(
        "Join these words with {n}: {l}", "Write this list with {n} between the items: {l}"
    ).format(n=name, l=", ".join(items))
    return ask("strings", question, sign.join(items), f"The items are joined with {name}.")
