"""A scheduler as the workloads drive it, and ours behind it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from benchmarks.overlapped import OverlappedScheduler
from benchmarks.peers.rows import OURS
from benchmarks.peers.sizes import PAGE_SIZE, VOCAB_SIZE, WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from benchmarks.peers.sizes import Sizes


class Steps(Protocol):
    """Running requests; `step` returns CPU ns of a plan and of a result."""

    @property
    def is_prefilling(self) -> bool:
        """Whether the step planned last holds prompt rows."""

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
    """`dsserve._native.Scheduler`, overlapped."""

    def __init__(self, running: int, sizes: Sizes) -> None:
        self._new_tokens = sizes.tokens_of_steps
        context = max(sizes.prompt_tokens + self._new_tokens, sizes.long_tokens + 1064)
        pages = running * ((sizes.prompt_tokens + self._new_tokens) // PAGE_SIZE + 2)
        self._loop = OverlappedScheduler(
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
        self._last_id = 0

    @property
    def is_prefilling(self) -> bool:
        """Whether the step planned last holds prompt rows."""
        return self._loop.is_prefilling

    def start(self, prompts: list[NDArray[np.uint32]]) -> None:
        """Submit the prompts and run until all decode."""
        self._submit([prompt.tobytes() for prompt in prompts], self._new_tokens)
        self._loop.plan()
        self._loop.prefill()

    def step(self) -> tuple[int, int]:
        """Plan the next step, apply the one in flight."""
        return self._loop.step()

    def arrive(self, prompt: NDArray[np.uint32]) -> tuple[int, int]:
        """Submit the long prompt and run the step that admits it."""
        ids = prompt.tobytes()
        started = time.thread_time_ns()
        self._submit([ids], 1000)
        submitted = time.thread_time_ns() - started
        return submitted, self.step()[0]

    def end_long(self) -> None:
        """Abort it and let its steps run out."""
        self._loop.end(self._last_id)

    def check(self) -> None:
        """Recount."""
        self._loop.scheduler.check_invariants()

    def _submit(self, prompts: list[bytes], new_tokens: int) -> None:
        first = self._last_id + 1
        self._last_id += len(prompts)
        self._loop.submit(
            [(first + number, prompt, new_tokens) for number, prompt in enumerate(prompts)]
        )
