"""What did the last steps do, and where does the loop's time go?

Totals for the metrics (`serving.md` h.1) and a ring of recent steps, which the state query and the
watchdog show. The sequence numbers say in which order the loop did things, without a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dsserve.worker.base import PHASE_DECODE, PHASE_PREFILL, PHASE_VERIFY

NUM_RECENT_STEPS = 256

Stage = Literal["receive", "plan", "launch", "complete", "result", "idle"]

PHASE_NAMES = {PHASE_PREFILL: "prefill", PHASE_DECODE: "decode", PHASE_VERIFY: "verify"}

HOST_GAP_BUCKETS_S = (
    1e-6,
    1e-5,
    5e-5,
    1e-4,
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    0.1,
    1.0,
)
"""Upper ends of the buckets of the host gap; one more has no end."""


@dataclass(slots=True)
class StepRecord:
    """One step. Times are `time.monotonic()`; 0 for what has not happened yet.

    Attributes:
        launch_order: Place of its launch among all launches and applications.
        apply_order: Place of the application of its result; 0 before.
    """

    step_id: int
    kind: str
    num_requests: int
    num_rows: int
    launch_order: int
    planned_s: float
    launched_s: float
    started_s: float = 0.0
    finished_s: float = 0.0
    applied_s: float = 0.0
    apply_order: int = 0


@dataclass(slots=True)
class _KindTotals:
    steps: int = 0
    step_s: float = 0.0
    gaps: int = 0
    gap_s: float = 0.0
    gap_counts: list[int] = field(default_factory=lambda: [0] * (len(HOST_GAP_BUCKETS_S) + 1))


@dataclass(slots=True)
class StepRecorder:
    """Collects records and totals. One thread writes; others may read a copy."""

    stage_s: dict[Stage, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("receive", "plan", "launch", "complete", "result", "idle"), 0.0
        )
    )
    passes_without_progress: int = 0
    _kinds: dict[str, _KindTotals] = field(default_factory=dict)
    _steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS))
    _order: int = 0
    _last_finished_s: float = 0.0

    def launched(
        self,
        *,
        step_id: int,
        phase: int,
        num_requests: int,
        num_rows: int,
        planned_s: float,
        launched_s: float,
    ) -> StepRecord:
        """Start the record of a step."""
        self._order += 1
        record = StepRecord(
            step_id=step_id,
            kind=PHASE_NAMES.get(phase, str(phase)),
            num_requests=num_requests,
            num_rows=num_rows,
            launch_order=self._order,
            planned_s=planned_s,
            launched_s=launched_s,
        )
        self._steps.append(record)
        return record

    def applied(
        self, record: StepRecord, *, started_s: float, finished_s: float, applied_s: float
    ) -> None:
        """Complete the record of a step."""
        self._order += 1
        record.apply_order = self._order
        record.started_s, record.finished_s = started_s, finished_s
        record.applied_s = applied_s
        totals = self._kinds.setdefault(record.kind, _KindTotals())
        totals.steps += 1
        totals.step_s += finished_s - started_s
        if self._last_finished_s:
            gap_s = max(0.0, started_s - self._last_finished_s)
            totals.gaps += 1
            totals.gap_s += gap_s
            totals.gap_counts[bisect_left(HOST_GAP_BUCKETS_S, gap_s)] += 1
        self._last_finished_s = finished_s

    def idled(self) -> None:
        """The loop had nothing to do: the time to the next step is no host gap."""
        self._last_finished_s = 0.0

    def totals(self) -> dict[str, Any]:
        """Seconds per stage; per kind of step their number, seconds and host gaps."""
        return {
            "scheduler_stage_seconds": {name: round(s, 6) for name, s in self.stage_s.items()},
            "step_seconds": {
                kind: {"count": totals.steps, "sum": round(totals.step_s, 6)}
                for kind, totals in self._kinds.items()
            },
            "host_gap_seconds": {
                kind: {
                    "count": totals.gaps,
                    "sum": round(totals.gap_s, 6),
                    "buckets": list(zip(HOST_GAP_BUCKETS_S, totals.gap_counts, strict=False)),
                }
                for kind, totals in self._kinds.items()
            },
            "no_progress_passes": self.passes_without_progress,
        }

    def recent(self, count: int = NUM_RECENT_STEPS) -> list[dict[str, Any]]:
        """The newest records, oldest first."""
        return [asdict(record) for record in list(self._steps)[-count:]]
