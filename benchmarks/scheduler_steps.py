"""How long do `next_plan` and `apply` take with 256 running requests, called from Python?"""

from __future__ import annotations

import json
import time

import numpy as np

from benchmarks.record import Figure, timing
from dsserve._native import Scheduler
from dsserve.worker.base import NUM_BUFFER_SETS, allocate_plan_buffers

REQUESTS = 256
PROMPT_TOKENS = 512
WARM_UP_STEPS = 100
STEPS = 2000
PAGE_SIZE = 64
VOCAB_SIZE = 129280
#: First bar of `next_plan` + `apply` together.
BAR_US = 1000.0


def measure() -> list[Figure]:
    """Decode steps of 256 requests in the overlapped order: plan step N+1, then apply step N."""
    bench = _Bench()
    bench.prefill()
    for _ in range(WARM_UP_STEPS):
        bench.step()
    timings = np.array([bench.step() for _ in range(STEPS)]) / 1e3
    bench.scheduler.check_invariants()
    settings = {
        "requests": REQUESTS,
        "prompt_tokens": PROMPT_TOKENS,
        "page_size": PAGE_SIZE,
        "order": "overlapped",
    }
    plan, apply = timings[:, 0], timings[:, 1]
    total = (plan + apply).tolist()
    return [
        timing("scheduler.plan_and_apply", total, bar_us=BAR_US, settings=settings),
        timing("scheduler.next_plan", plan.tolist(), bar_us=None, settings=settings),
        timing("scheduler.apply", apply.tolist(), bar_us=None, settings=settings),
    ]


class _Bench:
    """A scheduler with running requests and one step in flight."""

    def __init__(self) -> None:
        new_tokens = WARM_UP_STEPS + STEPS + 100
        context = PROMPT_TOKENS + new_tokens
        config = {
            "page_size": PAGE_SIZE,
            "num_pages": (REQUESTS + 1) * (context // PAGE_SIZE + 2),
            "max_running_requests": REQUESTS,
            "chunked_prefill_size": 8192,
            "context_length": context,
            "window": 128,
            "vocab_size": VOCAB_SIZE,
        }
        self.scheduler = Scheduler(json.dumps(config))
        capacity = self.scheduler.plan_capacity()
        self._sets = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
        self.scheduler.register_buffers(self._sets)
        random = np.random.default_rng(0)
        prompts = random.integers(3, VOCAB_SIZE, size=(REQUESTS, PROMPT_TOKENS), dtype=np.uint32)
        rejected = self.scheduler.submit(
            [
                {
                    "request_id": number + 1,
                    "token_ids": prompt.tobytes(),
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                }
                for number, prompt in enumerate(prompts)
            ]
        )
        if rejected:
            raise RuntimeError(f"the scheduler rejected requests: {rejected[0]}")
        self._ids = random.integers(3, VOCAB_SIZE, size=REQUESTS, dtype=np.int32)
        self._planned = 0
        self._in_flight = self._plan()

    def prefill(self) -> None:
        """Run steps until every request decodes."""
        for _ in range(100 * REQUESTS):
            self.step()
            header = self._sets[self._in_flight % NUM_BUFFER_SETS]["header"]
            if header[1] == 2 and header[2] == REQUESTS:
                return
        raise RuntimeError("the requests never all decoded")

    def step(self) -> tuple[int, int]:
        """Plan the next step, apply the one in flight; returns nanoseconds of both."""
        oldest = self._sets[self._in_flight % NUM_BUFFER_SETS]
        num_requests = int(oldest["header"][2])
        samples = oldest["samples"][:num_requests]
        ids = np.where(samples == 1, self._ids[:num_requests], np.int32(-1))
        status = np.zeros(num_requests, np.uint8)
        step_id = int(oldest["header"][0])
        started = time.perf_counter_ns()
        planned = self._plan()
        middle = time.perf_counter_ns()
        self.scheduler.apply(step_id, ids, status, self._planned)
        finished = time.perf_counter_ns()
        self._in_flight = planned
        return middle - started, finished - middle

    def _plan(self) -> int:
        """Plan one step; returns its number, which gives its buffer set."""
        number = self._planned
        if self.scheduler.next_plan(number % NUM_BUFFER_SETS, number) is None:
            raise RuntimeError("the scheduler planned no step although requests run")
        self._planned += 1
        return number
