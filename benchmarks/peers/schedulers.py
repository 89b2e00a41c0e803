"""A scheduler as the workloads drive it, and ours behind it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from benchmarks.peers.rows import OURS
from benchmarks.peers.sizes import PAGE_SIZE, VOCAB_SIZE, WINDOW
from dsserve._native import Scheduler
from dsserve.worker.base import NUM_BUFFER_SETS, allocate_plan_buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.peers.sizes import Sizes

PREFILL = 1


class Steps(Protocol):
    """Running requests; `step` returns CPU ns of a plan and of a result."""

    is_prefilling: bool

    def start(self, prompts: list[NDArray[np.uint32]]) -> None:
        """Run the prompts until all decode."""

    def step(self) -> tuple[int, int]:
        """Plan a step and give back a result."""

    def arrive(self, prompt: NDArray[np.uint32]) -> tuple[int, int]:
        """Submit a long prompt; returns ns of the submission and of the plan that admits it."""

    def end_long(self) -> None:
        """End the long request."""

    def check(self) -> None:
        """Raise if the accounting is wrong."""


@dataclass(frozen=True, slots=True)
class SchedulerKind:
    """An implementation: its name, and how to build it for so many running requests."""

    name: str
    build: Callable[[int, Sizes], Steps]


def our_scheduler() -> SchedulerKind:
    """Return ours."""
    return SchedulerKind(OURS, OurSteps)


class OurSteps:
    """`dsserve._native.Scheduler`, overlapped: step N+1 is planned before step N is applied."""

    def __init__(self, running: int, sizes: Sizes) -> None:
        self._new_tokens = sizes.tokens_of_steps
        context = max(sizes.prompt_tokens + self._new_tokens, sizes.long_tokens + 1064)
        pages = running * ((sizes.prompt_tokens + self._new_tokens) // PAGE_SIZE + 2)
        self._scheduler = Scheduler(
            json.dumps(
                {
                    "page_size": PAGE_SIZE,
                    "num_pages": pages + 2 * (sizes.long_tokens // PAGE_SIZE + 2),
                    "max_running_requests": running + 1,
                    "chunked_prefill_size": sizes.chunk + running,
                    "mixed_chunk": True,
                    "context_length": context,
                    "window": WINDOW,
                    "vocab_size": VOCAB_SIZE,
                }
            )
        )
        capacity = self._scheduler.plan_capacity()
        self._sets = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
        self._scheduler.register_buffers(self._sets)
        self._planned = 0
        self._in_flight: list[int] = []
        self._last_id = 0
        self.is_prefilling = False

    def start(self, prompts: list[NDArray[np.uint32]]) -> None:
        """Submit the prompts and run until all decode."""
        self._submit([prompt.tobytes() for prompt in prompts], self._new_tokens)
        self._plan()
        while self.is_prefilling:
            self.step()

    def step(self) -> tuple[int, int]:
        """Plan the next step, apply the one in flight."""
        number = self._in_flight.pop(0)
        oldest = self._sets[number % NUM_BUFFER_SETS]
        num_requests = int(oldest["header"][2])
        ids = np.where(oldest["samples"][:num_requests] == 1, np.int32(7), np.int32(-1))
        status = np.zeros(num_requests, np.uint8)
        step_id = int(oldest["header"][0])
        clock = time.thread_time_ns
        started = clock()
        self._plan()
        planned = clock()
        self._scheduler.apply(step_id, ids, status, self._planned)
        return planned - started, clock() - planned

    def arrive(self, prompt: NDArray[np.uint32]) -> tuple[int, int]:
        """Submit the long prompt and run the step that admits it."""
        ids = prompt.tobytes()
        started = time.thread_time_ns()
        self._submit([ids], 1000)
        submitted = time.thread_time_ns() - started
        return submitted, self.step()[0]

    def end_long(self) -> None:
        """Abort it and let its steps run out."""
        self._scheduler.abort([self._last_id])
        for _ in range(NUM_BUFFER_SETS):
            self.step()

    def check(self) -> None:
        """Recount."""
        self._scheduler.check_invariants()

    def _submit(self, prompts: list[bytes], new_tokens: int) -> None:
        first = self._last_id + 1
        self._last_id += len(prompts)
        rejected = self._scheduler.submit(
            [
                {
                    "request_id": first + number,
                    "token_ids": prompt,
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                }
                for number, prompt in enumerate(prompts)
            ]
        )
        if rejected:
            raise RuntimeError(f"the scheduler rejected requests: {rejected[0]}")

    def _plan(self) -> None:
        summary = self._scheduler.next_plan(self._planned % NUM_BUFFER_SETS, self._planned)
        if summary is None:
            raise RuntimeError("the scheduler planned no step although requests run")
        self.is_prefilling = summary.phase == PREFILL
        self._in_flight.append(self._planned)
        self._planned += 1
