"""What a run found: verdicts per row, the wrong cases, whether a threshold is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.tiny_model.served.cases import Case, Reply
    from tools.tiny_model.served.rows import RowSpec

_ROUNDING = 1e-9


@dataclass(slots=True)
class Answered:
    """A case with the reply to it."""

    case: Case
    reply: Reply

    @property
    def is_right(self) -> bool:
        """Whether the final answer is the expected one."""
        return self.case.is_right(self.reply)


@dataclass(slots=True)
class Result:
    """One row of the table.

    Attributes:
        spec: The row.
        count: Examples.
        score: Share or length.
        base: For compared rows the score of the same examples without a hit or retraction.
        note: What else the reader should know.
        broken: Why the row does not count at all; empty if it does.
    """

    spec: RowSpec
    count: int
    score: float
    base: float | None = None
    note: str = ""
    broken: str = ""

    @property
    def threshold(self) -> float:
        """What the score must reach."""
        return self._reach(self.spec.at_least)

    @property
    def aim(self) -> float | None:
        """What it should reach."""
        return None if self.spec.aim is None else self._reach(self.spec.aim)

    @property
    def passed(self) -> bool:
        """Whether the row counts and reaches its threshold."""
        return not self.broken and self.count > 0 and self.score >= self.threshold - _ROUNDING

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "row": self.spec.name, "count": self.count, "score": self.score, "base": self.base,
            "at_least": self.threshold, "aim": self.aim, "passed": self.passed,
            "note": self.broken or self.note,
        }  # fmt: skip

    def _reach(self, value: float) -> float:
        return (self.base or 0.0) - value if self.spec.is_compared else value


@dataclass(slots=True)
class Wrong:
    """A case that was not right, for the JSON file."""

    row: str
    case: Case
    reply: Reply
    fault: str

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "row": self.row, "index": self.case.index, "fault": self.fault, "expected": self.case.expected(),
            "got": asdict(self.reply), "request": self.case.body(),
        }  # fmt: skip


@dataclass(slots=True)
class Findings:
    """All of a run."""

    results: list[Result] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    #: Every reply of the answer rows, for the rows that look at all of them.
    answered: list[Answered] = field(default_factory=list)

    def add_answers(
        self, spec: RowSpec, answered: list[Answered], *, base: float | None = None, note: str = "", broken: str = ""
    ) -> Result:  # fmt: skip
        """Score exact answers and keep the wrong ones."""
        right = sum(each.is_right for each in answered)
        self.wrong += [
            Wrong(spec.name, each.case, each.reply, "answer")
            for each in answered
            if not each.is_right
        ]
        return self.add(spec, len(answered), right / max(len(answered), 1), base, note, broken)

    def add(
        self, spec: RowSpec, count: int, score: float, base: float | None = None, note: str = "", broken: str = ""
    ) -> Result:  # fmt: skip
        """Append a row."""
        result = Result(spec, count, score, base, note, broken)
        self.results.append(result)
        return result
