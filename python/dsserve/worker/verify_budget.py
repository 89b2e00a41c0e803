"""The host's part of confidence-scheduled verification: what steps taught, and how many drafts the next one verifies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsserve.speculative.cost import CostModel
from dsserve.speculative.schedule import VerifyBudget
from dsserve.worker.base import PHASE_VERIFY

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from dsserve.worker.batch import PlanView


@dataclass(frozen=True, slots=True)
class StepLesson:
    """What a finished step teaches.

    Attributes:
        plan: The step.
        num_rows: Rows that it ran.
        step_s: Seconds it took.
        drafting: [D] of its requests, those that got new drafts.
        confidences: [D, gamma] of these drafts.
    """

    plan: PlanView
    num_rows: int
    step_s: float
    drafting: NDArray[np.int64]
    confidences: NDArray[np.float32]


class VerifyPlanner:
    """Called by the thread that launches, in launch order; `finished` by the stream."""

    def __init__(self, *, gamma: int, num_slots: int, table: Path | None) -> None:
        """Nothing learnt yet; with a cost `table` there is nothing to learn but confidences."""
        self.cost = CostModel() if table is None else CostModel.from_table(table)
        self._budget = VerifyBudget(self.cost, gamma=gamma, num_slots=num_slots)
        self._lessons: deque[StepLesson] = deque()

    def finished(self, lesson: StepLesson) -> None:
        """Note a step's lesson; it is learnt before the next launch."""
        self._lessons.append(lesson)

    def budget_of(self, plan: PlanView) -> int | None:
        """Drafts that a VERIFY step verifies in all; None for other steps."""
        self._learn()
        if plan.phase != PHASE_VERIFY:
            return None
        return self._budget.budget(plan.step_id, plan.request_slot, plan.request_id, plan.draft_len)

    def _learn(self) -> None:
        while self._lessons:
            lesson = self._lessons.popleft()
            plan, which = lesson.plan, lesson.drafting
            self._budget.observe(
                plan.step_id, plan.request_slot[which], plan.request_id[which], lesson.confidences
            )
            if plan.phase == PHASE_VERIFY:
                self.cost.observe(plan.num_requests, lesson.num_rows, lesson.step_s)
