"""Rows of the table: which held-out examples, how they are served, and what they must reach."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Kind(Enum):
    """How the score of a row comes about."""

    #: Exact answers to the examples of `data`.
    ANSWER = "answer"
    #: The same, and the score is compared with the row `data`, on the same examples.
    AFTER_HIT = "after a prefix hit"
    AFTER_RETRACTION = "after retraction"
    #: Of the answers of row `data`, those that parse as JSON.
    PARSES = "parses"
    #: Of all answers of the run, those whose reasoning is there, is closed, or is absent, as asked for.
    THINKING = "thinking"
    #: Of all answers of the run, those that end by themselves.
    ENDS = "ends"
    #: Prompts whose reasoning grows with the effort.
    EFFORT = "effort"
    #: Tokens a round of the draft head.
    ACCEPT_MEAN = "accept mean"
    ACCEPT_LEAST = "accept least"


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One row.

    Attributes:
        name: As shown and as selected by.
        kind: How it is scored.
        data: Row of `EVALUATION`, or for derived rows the name of a row they look at; empty for none.
        at_least: Threshold; for rows served after a hit or a retraction, how much less than row `data` they may be.
        aim: What is aimed at, in the same terms; None where nothing is.
    """

    name: str
    kind: Kind
    data: str
    at_least: float
    aim: float | None

    @property
    def is_compared(self) -> bool:
        """Whether `at_least` is a distance to the row `data`."""
        return self.kind in (Kind.AFTER_HIT, Kind.AFTER_RETRACTION)

    @property
    def is_length(self) -> bool:
        """Whether the score is a length in tokens and not a share."""
        return self.kind in (Kind.ACCEPT_MEAN, Kind.ACCEPT_LEAST)


def _answers(at_least: float, aim: float, *names: str) -> list[RowSpec]:
    return [RowSpec(name, Kind.ANSWER, name, at_least, aim) for name in names]


_CONTEXTS = ("key-value 256", "key-value 1K", "key-value 2K")

ROWS: tuple[RowSpec, ...] = (
    *_answers(0.95, 0.99, "key-value 256"),
    *_answers(0.90, 0.97, "key-value 1K"),
    *_answers(0.85, 0.90, "key-value 2K"),
    *(RowSpec(f"{name} hit", Kind.AFTER_HIT, name, 0.03, 0.02) for name in _CONTEXTS),
    *(RowSpec(f"{name} retracted", Kind.AFTER_RETRACTION, name, 0.03, 0.02) for name in _CONTEXTS),
    *_answers(0.98, 0.99, "needle 256", "needle 1K", "needle 2K", "table"),
    *_answers(0.95, 0.99, "arithmetic"),
    *_answers(0.92, 0.97, "strings", "copy", "sort", "counting", "date", "units"),
    *_answers(0.90, 0.95, "unseen copy", "unseen recall", "unseen key-value"),
    *_answers(0.95, 0.98, "tools known"),
    *_answers(0.85, 0.95, "tools unseen"),
    RowSpec("json parses", Kind.PARSES, "json", 1.0, 1.0),
    *_answers(0.95, 0.98, "json"),
    *_answers(0.92, 0.97, "several turns", "talk", "only-answer", "chinese", "itself"),
    *_answers(0.90, 0.95, "refusal"),
    RowSpec("thinking", Kind.THINKING, "counting", 0.99, 1.0),
    RowSpec("effort", Kind.EFFORT, "", 0.99, 1.0),
    RowSpec("ends", Kind.ENDS, "counting", 0.99, 1.0),
    RowSpec("accept length", Kind.ACCEPT_MEAN, "", 3.0, 4.5),
    RowSpec("accept length least", Kind.ACCEPT_LEAST, "", 2.0, None),
)  # fmt: skip


class Misuse(Exception):  # noqa: N818 - reads as what happened
    """A row or a checkpoint that does not exist; the message is one line for the user."""


def select_rows(names: Iterable[str]) -> list[RowSpec]:
    """The rows of these names and the rows they look at, in the order of the table; all rows for no name.

    Raises:
        Misuse: If there is no such row.
    """
    by_name = {row.name: row for row in ROWS}
    wanted: set[str] = set()
    for name in names:
        if name not in by_name:
            raise Misuse(f"no row {name!r}; there are {', '.join(by_name)}")
        wanted.add(name)
        if by_name[name].data:
            wanted.add(by_name[name].data)
    return [row for row in ROWS if row.name in wanted or not wanted]
