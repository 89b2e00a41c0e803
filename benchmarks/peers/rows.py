"""What the comparison collects: a value a round for each workload and implementation."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.record import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The implementation that all others are compared with.
OURS = "dsserve"


@dataclass(slots=True)
class Row:
    """One workload run by one implementation; less is better.

    Attributes:
        workload: What was measured.
        unit: Unit of all values.
        implementation: Who ran it.
        rounds: A value for each round.
        bar: What ours must not exceed.
        note: What a reader should know about the value.
    """

    workload: str
    unit: str
    implementation: str
    rounds: list[float] = field(default_factory=list)
    bar: float | None = None
    note: str = ""

    @property
    def value(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)

    def figure(self, ours: Row | None) -> Figure:
        """Return it for the result file, with the ratio to ours if that is known."""
        settings = {
            "implementation": self.implementation,
            "min": min(self.rounds),
            "max": max(self.rounds),
            "rounds": len(self.rounds),
            "note": self.note,
        }
        if ours is not None and ours is not self and ours.value > 0:
            settings["times_dsserve"] = round(self.value / ours.value, 2)
        return Figure(
            f"peers.{self.workload}.{self.implementation}",
            self.unit,
            self.value,
            self.value,
            None,
            len(self.rounds),
            bar=self.bar,
            settings=settings,
        )


class Rows:
    """Rows by workload and implementation, in the order of their first value."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}

    def add(
        self,
        workload: str,
        unit: str,
        implementation: str,
        value: float,
        *,
        bar: float | None = None,
        note: str = "",
    ) -> None:
        """Add the value of a round; `bar` is for ours alone."""
        key = (workload, implementation)
        if key not in self._rows:
            is_ours = implementation == OURS
            row = Row(workload, unit, implementation, bar=bar if is_ours else None, note=note)
            self._rows[key] = row
        self._rows[key].rounds.append(value)

    def all(self) -> list[Row]:
        """Return every row, those of a workload together."""
        workloads = list(dict.fromkeys(workload for workload, _ in self._rows))
        return [row for name in workloads for row in self._rows.values() if row.workload == name]

    def ours(self, workload: str) -> Row | None:
        """Return our row of a workload."""
        return self._rows.get((workload, OURS))


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's cycle collector out of what is timed, for everybody."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def clock_cost_ns() -> float:
    """Return what two readings of the thread's CPU clock cost, to take off single operations."""
    clock = time.thread_time_ns
    return statistics.median(-(clock() - clock()) for _ in range(2000))
