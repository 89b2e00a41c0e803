"""The scheduler driven as the step loop drives it: step N+1 is planned before step N is applied."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dsserve._native import Scheduler
from dsserve.worker.base import NUM_BUFFER_SETS, allocate_plan_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PREFILL = 1
_TOKEN = np.int32(7)


class OverlappedScheduler:
    """A scheduler with one step in flight; every row that samples gets the same token.

    Attributes:
        scheduler: The scheduler itself.
        is_prefilling: Whether the step planned last holds prompt rows.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.scheduler = Scheduler(json.dumps(config))
        capacity = self.scheduler.plan_capacity()
        self._sets = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
        self.scheduler.register_buffers(self._sets)
        self._planned = 0
        self._in_flight: list[int] = []
        self.is_prefilling = False

    def submit(self, requests: Iterable[tuple[int, bytes, int]]) -> None:
        """Submit (id, prompt as uint32 bytes, tokens to generate).

        Raises:
            RuntimeError: If one is rejected.
        """
        self.submit_specs([self.spec(*request) for request in requests])

    @staticmethod
    def spec(request_id: int, prompt: bytes, max_new_tokens: int) -> dict[str, Any]:
        """Return a request as the scheduler takes it."""
        return {
            "request_id": request_id,
            "token_ids": prompt,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
        }

    def submit_specs(self, specs: list[dict[str, Any]]) -> None:
        """Submit requests.

        Raises:
            RuntimeError: If one is rejected.
        """
        rejected = self.scheduler.submit(specs)
        if rejected:
            raise RuntimeError(f"the scheduler rejected requests: {rejected[0]}")

    def plan(self) -> None:
        """Plan a step.

        Raises:
            RuntimeError: If there is none.
        """
        summary = self.scheduler.next_plan(self._planned % NUM_BUFFER_SETS, self._planned)
        if summary is None:
            raise RuntimeError("the scheduler planned no step although requests run")
        self.is_prefilling = summary.phase == _PREFILL
        self._in_flight.append(self._planned)
        self._planned += 1

    def step(self) -> tuple[int, int]:
        """Plan the next step, apply the one in flight; returns nanoseconds of both."""
        number = self._in_flight.pop(0)
        oldest = self._sets[number % NUM_BUFFER_SETS]
        num_requests = int(oldest["header"][2])
        ids = np.where(oldest["samples"][:num_requests] == 1, _TOKEN, np.int32(-1))
        status = np.zeros(num_requests, np.uint8)
        step_id = int(oldest["header"][0])
        started = time.thread_time_ns()
        self.plan()
        planned = time.thread_time_ns()
        self.scheduler.apply(step_id, ids, status, self._planned)
        return planned - started, time.thread_time_ns() - planned

    def prefill(self) -> None:
        """Run steps until every request decodes."""
        while self.is_prefilling:
            self.step()

    def end(self, request_id: int) -> None:
        """Abort a request and let its steps run out."""
        self.scheduler.abort([request_id])
        for _ in range(NUM_BUFFER_SETS):
            self.step()
