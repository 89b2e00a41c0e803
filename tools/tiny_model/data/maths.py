"""Arithmetic by columns, counting, dates, units and comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.tiny_model.data.example import Example, ask
from tools.tiny_model.data.lexicon import is_held_out

if TYPE_CHECKING:
    from tools.tiny_model.data.lexicon import Lexicon

_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_UNITS = (
    ("kilometres", "metres", 1000), ("kilograms", "grams", 1000), ("metres", "centimetres", 100),
    ("litres", "millilitres", 1000), ("centimetres", "millimetres", 10), ("tonnes", "kilograms", 1000),
    ("euros", "cents", 100), ("dollars", "cents", 100), ("seconds", "milliseconds", 1000), ("km", "m", 1000),
    ("kg", "g", 1000), ("cm", "mm", 10), ("m", "cm", 100),
)  # fmt: skip
_TIMES = (
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
)


def add_steps(first: int, second: int) -> str:
    """Columns from the right with carries."""
    width = max(len(str(first)), len(str(second)))
    a, b = f"{first:0{width}d}", f"{second:0{width}d}"
    carry, parts = 0, []
    for x, y in zip(reversed(a), reversed(b), strict=True):
        total = int(x) + int(y) + carry
        parts.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return f"{a}+{b}: {' '.join(parts)}"


def subtract_steps(first: int, second: int) -> str:
    """Columns from the right with borrows; the smaller number is taken from the larger."""
    large, small = max(first, second), min(first, second)
    width = len(str(large))
    a, b = str(large), f"{small:0{width}d}"
    borrow, parts = 0, []
    for x, y in zip(reversed(a), reversed(b), strict=True):
        total = int(x) - int(y) - borrow
        parts.append(f"{x}-{y}-{borrow}={total % 10}{'b' if total < 0 else ''}")
        borrow = int(total < 0)
    sign = "negative, " if first < second else ""
    return f"{sign}{a}-{b}: {' '.join(parts)}"


def times_digit_steps(first: int, digit: int) -> str:
    """Columns from the right of a number times one digit."""
    carry, parts = 0, []
    for x in reversed(str(first)):
        total = int(x) * digit + carry
        parts.append(f"{x}x{digit}+{carry}={total:02d}")
        carry = total // 10
    return f"{first}x{digit}: {' '.join(parts)} = {first * digit}"


def multiply_steps(first: int, second: int) -> str:
    """One line per digit of the second factor, then the sum."""
    if second < 10:
        return times_digit_steps(first, second)
    tens, ones = divmod(second, 10)
    high, low = first * tens * 10, first * ones
    return f"{times_digit_steps(first, tens)}, {high}; {times_digit_steps(first, ones)}; {add_steps(high, low)}"


def arithmetic(lex: Lexicon, _budget: int) -> Example:
    """Sums, differences and products; operands are drawn by digit count."""
    while True:
        sign = lex.rng.choices("+-x", (45, 35, 20))[0]
        if sign == "x":
            digits = lex.rng.choice(((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)))
            first, second = (int(lex.number(d, d)) for d in digits)
            if second > first and second > 9:
                first, second = second, first
        else:
            first, second = int(lex.number(1, 4)), int(lex.number(1, 4))
        if is_held_out(f"{first}{sign}{second}") == lex.held_out or max(first, second) < 10:
            break
    return sum_example(lex, first, sign, second)


def sum_example(lex: Lexicon, first: int, sign: str, second: int) -> Example:
    """The question about one calculation, with its steps if it has two digits or more."""
    result = {"+": first + second, "-": first - second, "x": first * second}[sign]
    steps = {"+": add_steps, "-": subtract_steps, "x": multiply_steps}[sign](first, second)
    shown = lex.pick(*{"+": "++", "-": "--", "x": "xx*×"}[sign])  # noqa: RUF001 - the sign users type
    word = {"+": "plus", "-": "minus", "x": "times"}[sign]
    space = lex.pick(" ", " ", "")
    expression = (
        f"{first}{space}{shown}{space}{second}" if lex.chance(0.85) else f"{first} {word} {second}"
    )
    question = lex.pick(
        "What is {e}?", "What is {e}?", "{e}", "{e} =", "{e}=?", "Calculate {e}.", "Compute {e}", "How much is {e}?",
        "what's {e}", "Solve {e}.",
    ).format(e=expression)  # fmt: skip
    small = max(first, second) < 10 or (sign != "x" and max(first, second) < 20)
    return ask(
        "arithmetic",
        question,
        str(result),
        f"{steps}. So {result}." if not small else f"{first}{sign}{second}={result}",
        needs_reason=not small,
    )


def counting(lex: Lexicon, _budget: int) -> Example:
    """Count up or down, count items of a list or letters of a word."""
    kind = lex.rng.random()
    if kind < 0.3:
        start = int(lex.number(1, 3))
        count = lex.rng.randint(2, 12)
        down = lex.chance(0.25) and start >= count
        step = -1 if down else 1
        numbers = [start + step * i for i in range(count)]
        question = lex.pick(
            "Count from {a} to {b}.", "Count from {a} to {b}", "List the numbers from {a} to {b}."
        )
        return ask(
            "counting",
            question.format(a=numbers[0], b=numbers[-1]),
            ", ".join(map(str, numbers)),
            f"From {numbers[0]} to {numbers[-1]}.",
        )
    if kind < 0.65:
        items = [lex.item() for _ in range(lex.rng.randint(1, 10))]
        question = lex.pick(
            "How many words are in this list: {l}?",
            "How many items: {l}",
            "Count the items: {l}",
            "How many elements does this list have? {l}",
        )
        reason = " ".join(f"{i} {item}" for i, item in enumerate(items, 1))
        return ask(
            "counting",
            question.format(l=", ".join(items)),
            str(len(items)),
            reason,
            needs_reason=True,
        )
    target, other = lex.item(), lex.distinct(lex.item, 3)
    items = [
        target if lex.chance(0.4) else lex.rng.choice(other) for _ in range(lex.rng.randint(3, 9))
    ]
    total, parts = 0, []
    for item in items:
        total += item == target
        parts.append(f"{item} {total}")
    question = f"How often does {target} occur in: {', '.join(items)}?"
    return ask("counting", question, str(total), ", ".join(parts), needs_reason=True)


def date(lex: Lexicon, _budget: int) -> Example:
    """Weekdays, months and days after and before a date."""
    kind = lex.rng.random()
    if kind < 0.3:
        index, count = lex.rng.randrange(7), lex.rng.randint(1, 7)
        after = lex.chance(0.65)
        result = _DAYS[(index + (count if after else -count)) % 7]
        chain = " ".join(
            f"{i} {_DAYS[(index + (i if after else -i)) % 7]}" for i in range(1, count + 1)
        )
        question = lex.pick(
            "Which day is {n} days {w} {d}?",
            "What day comes {n} days {w} {d}?",
            "What day is {n} days {w} {d}?",
        )
        return ask(
            "date",
            question.format(n=count, w="after" if after else "before", d=_DAYS[index]),
            result,
            chain,
            needs_reason=count > 2,
        )
    if kind < 0.45:
        names = _MONTHS if lex.chance(0.6) else _DAYS
        index, step = lex.rng.randrange(len(names)), lex.rng.choice((1, -1))
        question = f"What comes {'after' if step > 0 else 'before'} {names[index]}?"
        return ask(
            "date",
            question,
            names[(index + step) % len(names)],
            f"{names[index]}, then {names[(index + step) % len(names)]}.",
        )
    if kind < 0.55:
        index = lex.rng.randrange(12)
        return ask(
            "date",
            lex.pick("How many days does {m} have?", "How many days are in {m}?").format(
                m=_MONTHS[index]
            ),
            "28 or 29" if index == 1 else str(_LENGTHS[index]),
            f"{_MONTHS[index]} is month {index + 1}.",
        )
    year, month = lex.rng.randint(1950, 2049), lex.rng.randrange(12)
    day = lex.rng.randint(1, _LENGTHS[month]) if lex.chance(0.7) else _LENGTHS[month]
    if kind < 0.75:
        written = f"{year}-{month + 1:02d}-{day:02d}"
        question = lex.pick(
            "Write {d} in words.", "Which date is {d}?", "Spell out the date {d}."
        ).format(d=written)
        return ask(
            "date",
            question,
            f"{day} {_MONTHS[month]} {year}",
            f"Month {month + 1:02d} is {_MONTHS[month]}.",
        )
    if month == 1 and day == 28:
        day = 27
    next_day = day + 1 if day < _LENGTHS[month] else 1
    next_month = month if next_day > 1 else (month + 1) % 12
    next_year = year if next_day > 1 or month < 11 else year + 1
    question = lex.pick("Which date comes after {d}?", "What is the day after {d}?").format(
        d=f"{year}-{month + 1:02d}-{day:02d}"
    )
    return ask(
        "date",
        question,
        f"{next_year}-{next_month + 1:02d}-{next_day:02d}",
        f"{_MONTHS[month]} has {_LENGTHS[month]} days, day {day} is followed by {next_day}.",
    )


def units(lex: Lexicon, _budget: int) -> Example:
    """Decimal units of any number; units of time in working steps."""
    if lex.chance(0.65):
        large, small, factor = lex.rng.choice(_UNITS)
        number = int(lex.number(1, 3)) or 1
        reason = f"1 {large} = {factor} {small}; {number} x {factor} = {number * factor}."
        needs = False
    else:
        large, small, factor = lex.rng.choice(_TIMES)
        number = lex.rng.randint(1, 30)
        needs = True
        reason = f"1 {large} = {factor} {small}; {multiply_steps(number, factor)}."
    question = lex.pick(
        "How many {s} are {n} {l}?", "Convert {n} {l} to {s}.", "{n} {l} in {s}?"
    ).format(s=small, n=number, l=large)
    return ask("units", question, f"{number * factor} {small}", reason, needs_reason=needs)


def only_answer(lex: Lexicon, _budget: int) -> Example:
    """One-word answers about comparisons and membership; the reasoning names the evidence."""
    head = lex.pick("Answer only with yes or no. ", "Answer yes or no: ", "Only yes or no: ", "")
    kind = lex.rng.random()
    if kind < 0.4:
        first, second = int(lex.number(1, 4)), int(lex.number(1, 4))
        if first == second:
            second += 1
        evidence = _compare(first, second)
        if lex.chance(0.5):
            larger = lex.chance(0.6)
            yes = (first > second) == larger
            question = f"{head}Is {first} {'larger' if larger else 'smaller'} than {second}?"
            return ask(
                "only-answer", question, "yes" if yes else "no", evidence, needs_reason=False
            )
        larger = lex.chance(0.6)
        question = f"Which number is {'larger' if larger else 'smaller'}, {first} or {second}? Answer only with the number."
        return ask(
            "only-answer",
            question,
            str(max(first, second) if larger else min(first, second)),
            evidence,
        )
    if kind < 0.8:
        items = lex.distinct(lex.item, lex.rng.randint(2, 8))
        inside = lex.chance(0.5)
        wanted = lex.rng.choice(items) if inside else lex.item()
        inside = wanted in items
        question = f"{head}Is {wanted} in this list: {', '.join(items)}?"
        seen = items[: items.index(wanted) + 1] if inside else items
        where = f"{wanted}: {' '.join(f'{i} {item}' for i, item in enumerate(seen, 1))}"
        return ask("only-answer", question, "yes" if inside else "no", where)
    number = int(lex.number(1, 4))
    even = lex.chance(0.5)
    question = f"{head}Is {number} {'even' if even else 'odd'}?"
    return ask(
        "only-answer",
        question,
        "yes" if (number % 2 == 0) == even else "no",
        f"The last digit is {number % 10}, {'even' if number % 2 == 0 else 'odd'}.",
    )


def _compare(first: int, second: int) -> str:
    a, b = str(first), str(second)
    if len(a) != len(b):
        return f"{first} has {len(a)} digits, {second} has {len(b)}."
    place = next(i for i in range(len(a)) if a[i] != b[i])
    return f"Digit {place + 1}: {a[place]} {'>' if a[place] > b[place] else '<'} {b[place]}."
