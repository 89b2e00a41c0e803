"""Plans one request by hand, in the arrays of a `StepPlan`, for the parity tool.

The scheduler keeps chunk ends on page boundaries and takes no hit within a window; golden runs need chunks of 16 or
33 tokens and hits of any even length. So this planner fills the same arrays under its own rules.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from dsserve import _native
from dsserve.worker.base import PHASE_DECODE, PHASE_PREFILL, PlanBuffers, allocate_plan_buffers
from dsserve.worker.batch import (
    NUM_DELTAS,
    NUM_REQUESTS,
    NUM_ROWS,
    NUM_SAMPLES,
    NUM_TAIL_ROWS,
    PHASE,
    STEP_ID,
    PlanView,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMESPACE = _native.CacheNamespace()
#: Ids before a request's first row that a plan carries.
HISTORY = 3


@dataclass(slots=True)
class Floors:
    """Where a request's reads and writes begin (replay.md sections 2 and 4)."""

    window: int = 0
    write: int = 0
    tail: int = 0


class RequestPlanner:
    """Steps of one request in one slot; pages come from a real prefix cache."""

    def __init__(
        self, cache: _native.RadixCache, *, slot: int, page_size: int, num_columns: int
    ) -> None:
        """A request that has nothing yet.

        Args:
            cache: Page pool and prefix tree.
            slot: Its request slot (1..).
            page_size: Tokens a page.
            num_columns: Columns of the page table.
        """
        self.floors = Floors()
        self.pages: list[int] = []
        self._cache = cache
        self._slot, self._page_size = slot, page_size
        self._num_columns = num_columns
        self._num_steps = 0
        self._num_written = 0

    def take_hit(self, token_ids: Sequence[int]) -> int:
        """Match the prefix cache; the pages found become the request's first ones. Returns the hit in tokens."""
        _, _, pages = self._cache.match_prefix(_NAMESPACE, np.array(token_ids, dtype=np.uint32))
        self.pages = pages.tolist()
        return len(self.pages) * self._page_size

    def insert(self, token_ids: Sequence[int]) -> None:
        """Put the complete pages of `token_ids` into the prefix cache."""
        num_pages = len(token_ids) // self._page_size
        ids = np.array(token_ids[: num_pages * self._page_size], dtype=np.uint32)
        self._cache.insert(_NAMESPACE, ids, np.array(self.pages[:num_pages], dtype=np.uint32))

    def step(
        self, token_ids: Sequence[int], start: int, history: Sequence[int], *, tail_len: int
    ) -> PlanView:
        """One step of the request.

        Args:
            token_ids: Ids of the rows; -1 reads the token that the step before sampled.
            start: Position of the first row.
            history: All ids before `start` (only the last three are used); empty for a decode row.
            tail_len: Rows that run the decoder half.
        """
        num_rows = len(token_ids)
        self._grow(start + num_rows)
        capacity = {"requests": 1, "rows": num_rows, "deltas": max(len(self.pages), 1), "slots": 1}
        plan = allocate_plan_buffers(capacity)
        header = plan["header"]
        self._num_steps += 1
        header[STEP_ID] = self._num_steps
        header[PHASE] = PHASE_PREFILL if history or start == 0 else PHASE_DECODE
        header[NUM_REQUESTS], header[NUM_ROWS], header[NUM_SAMPLES] = 1, num_rows, 1
        header[NUM_TAIL_ROWS] = tail_len
        plan["request_id"][0], plan["request_slot"][0] = self._slot, self._slot
        plan["cu_seqlens"][1] = num_rows
        plan["start_position"][0], plan["tail_len"][0] = start, tail_len
        plan["window_floor"][0] = self.floors.window
        plan["write_floor"][0] = self.floors.write
        plan["tail_floor"][0] = self.floors.tail
        plan["samples"][0] = 1 if tail_len else 0
        plan["token_ids"][:] = token_ids
        plan["positions"][:] = np.arange(start, start + num_rows)
        seeds = [-1] * HISTORY + list(history) if header[PHASE] == PHASE_PREFILL else [-2] * HISTORY
        plan["history_ids"][0] = seeds[-HISTORY:]
        self._write_deltas(plan)
        return PlanView.of(plan)

    def _grow(self, num_tokens: int) -> None:
        missing = -(-num_tokens // self._page_size) - len(self.pages)
        if missing > 0:
            pages = self._cache.allocate(missing)
            if pages is None:
                raise RuntimeError(f"the pool has no {missing} free pages")
            self.pages.extend(pages.tolist())

    def _write_deltas(self, plan: PlanBuffers) -> None:
        new = range(self._num_written, len(self.pages))
        plan["header"][NUM_DELTAS] = len(new)
        for index, column in enumerate(new):
            plan["page_deltas"][index] = (self._slot, column, self.pages[column])
        self._num_written = len(self.pages)


def merge_plans(plans: Sequence[PlanView]) -> PlanView:
    """One step of several requests; step id and phase are those of the first."""
    values: dict[str, Any] = {}
    for field in fields(PlanView):
        parts = [getattr(plan, field.name) for plan in plans]
        if field.name in ("step_id", "phase"):
            values[field.name] = parts[0]
        elif field.name == "cu_seqlens":
            lengths = np.concatenate([np.diff(part) for part in parts])
            values[field.name] = np.concatenate(([0], np.cumsum(lengths)))
        else:
            values[field.name] = np.concatenate(parts)
    return PlanView(**values)
