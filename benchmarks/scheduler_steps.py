"""How much CPU do the scheduler's calls take, made from Python as the step loop makes them?

`decode/N`: N running requests of 1,024 prompt tokens, one token a step. `mixed`: a 128K prompt in chunks of
8,192 beside them. `arrival`: the submission of that prompt and the first plan that admits it. `1M`: the
longest pass of a prompt of a million tokens, from submission to its end: each hands over a part of it, plans
and applies as the loop does. CPU time of the calling thread; objects of the start are out of the collector's
sight, as in the engine.
"""

from __future__ import annotations

import gc
import time

import numpy as np

from benchmarks.overlapped import OverlappedScheduler
from benchmarks.record import Figure, timing
from dsserve.engine.parts import PromptParts

PROMPT_TOKENS = 1024
LONG_PROMPT_TOKENS = 131_072
LONGEST_PROMPT_TOKENS = 1_000_000
CHUNK = 8192
PAGE_SIZE = 64
VOCAB_SIZE = 129_280
WARM_UP_STEPS = 50
#: Running requests -> steps measured, bar of `next_plan` + `apply` in microseconds.
DECODE = {64: (1500, 20.0), 256: (800, 80.0), 1024: (300, 300.0)}
MIXED_OVER_PURE_US = 100.0
ARRIVAL_BAR_US = 500.0
LONGEST_STEP_BAR_US = 2000.0


def measure() -> list[Figure]:
    """Measure all workloads, each in the overlapped order: plan step N+1, then apply step N."""
    figures = []
    gc.collect()
    gc.freeze()
    for num_requests, (num_steps, bar_us) in DECODE.items():
        figures += _measure_decode(num_requests, num_steps, bar_us)
    figures.append(_measure_longest())
    gc.unfreeze()
    return figures


def _measure_decode(num_requests: int, num_steps: int, bar_us: float) -> list[Figure]:
    bench = _Bench(num_requests, num_steps + 400, LONG_PROMPT_TOKENS)
    bench.prefill()
    for _ in range(WARM_UP_STEPS):
        bench.step()
    timings = np.array([bench.step() for _ in range(num_steps)]) / 1e3
    settings = {
        "requests": num_requests,
        "prompt_tokens": PROMPT_TOKENS,
        "page_size": PAGE_SIZE,
        "order": "overlapped",
        "clock": "thread CPU time",
    }
    name = f"scheduler.decode.{num_requests}"
    total = timings.sum(axis=1)
    figures = [
        timing(f"{name}.step", total.tolist(), bar_us=bar_us, settings=settings),
        timing(f"{name}.plan", timings[:, 0].tolist(), bar_us=None, settings=settings),
        timing(f"{name}.apply", timings[:, 1].tolist(), bar_us=None, settings=settings),
    ]
    pure_us = float(np.median(total))
    arrivals, mixed = [], []
    for _ in range(3):
        arrivals.append(bench.arrive(LONG_PROMPT_TOKENS) / 1e3)
        while bench.is_prefilling:
            mixed.append(sum(bench.step()) / 1e3)
        bench.abort_long()
    bench.scheduler.check_invariants()
    figures.append(
        timing(
            f"scheduler.mixed.{num_requests}.step",
            mixed,
            bar_us=pure_us + MIXED_OVER_PURE_US,
            settings=settings | {"pure_us": round(pure_us, 1), "chunk": CHUNK},
        )
    )
    figures.append(
        timing(
            f"scheduler.arrival.128K.{num_requests}",
            arrivals,
            bar_us=ARRIVAL_BAR_US,
            settings=settings,
        )
    )
    return figures


def _measure_longest() -> Figure:
    """The longest pass of a 1M-token prompt: parts, admission, chunks, last chunk, insertion, end.

    The first prompt is new, the second a hit, the third fills the pool, the fourth takes others' pages.
    """
    bench = _Bench(1, 700, LONGEST_PROMPT_TOKENS + 1000)
    passes_us = []
    for is_same in (False, True, False, False):
        passes_us += [took / 1e3 for took in bench.hand_over(LONGEST_PROMPT_TOKENS, same=is_same)]
        while bench.is_prefilling:
            passes_us.append(sum(bench.step()) / 1e3)
        passes_us += [sum(bench.step()) / 1e3 for _ in range(3)]
        started = time.thread_time_ns()
        bench.abort_long()
        passes_us.append((time.thread_time_ns() - started) / 1e3)
    bench.scheduler.check_invariants()
    figure = timing(
        "scheduler.prompt.1M.step",
        passes_us,
        bar_us=None,
        settings={"chunk": CHUNK, "page_size": PAGE_SIZE, "clock": "thread CPU time"},
    )
    return Figure(
        name="scheduler.prompt.1M.longest_step",
        unit=figure.unit,
        value=max(passes_us),
        p50=figure.p50,
        p99=figure.p99,
        count=len(passes_us),
        bar=LONGEST_STEP_BAR_US,
        settings=figure.settings,
    )


class _Bench(OverlappedScheduler):
    """Running requests, and long prompts beside them."""

    def __init__(self, num_requests: int, new_tokens: int, longest: int) -> None:
        context = max(PROMPT_TOKENS + new_tokens, longest + 64)
        pages = num_requests * ((PROMPT_TOKENS + new_tokens) // PAGE_SIZE + 2)
        super().__init__(
            {
                "page_size": PAGE_SIZE,
                "num_pages": pages + 2 * (longest // PAGE_SIZE + 2),
                "max_running_requests": num_requests + 1,
                "chunked_prefill_size": CHUNK + num_requests + 1,
                "mixed_chunk": True,
                "context_length": context,
                "window": 128,
                "vocab_size": VOCAB_SIZE,
            }
        )
        self._random = np.random.default_rng(0)
        self._long_id = 10_000_000
        self._long: bytes | None = None
        self.submit(
            [(number + 1, self._ids(PROMPT_TOKENS), new_tokens) for number in range(num_requests)]
        )
        self.plan()

    def arrive(self, num_tokens: int, *, same: bool = False) -> int:
        """Submit a long prompt and plan its first step; returns the nanoseconds over a usual plan."""
        if self._long is None or not same:
            self._long = self._ids(num_tokens)
        self._long_id += 1
        usual = min(self.step()[0] for _ in range(5))
        started = time.thread_time_ns()
        self.submit([(self._long_id, self._long, 40)])
        submitted = time.thread_time_ns()
        plan, _ = self.step()
        return submitted - started + max(0, plan - usual)

    def hand_over(self, num_tokens: int, *, same: bool) -> list[int]:
        """Submit a long prompt in parts, one a pass; returns the nanoseconds of each pass."""
        if self._long is None or not same:
            self._long = self._ids(num_tokens)
        self._long_id += 1
        parts = PromptParts()
        spec = self.spec(self._long_id, self._long, 40)
        started = time.thread_time_ns()
        parts.begin(spec)
        self.submit_specs([spec])
        passes = []
        while parts:
            parts.feed(self.scheduler)
            fed = time.thread_time_ns() - started
            passes.append(fed + sum(self.step()))
            started = time.thread_time_ns()
        return passes

    def abort_long(self) -> None:
        """End the long request and let its steps run out."""
        self.end(self._long_id)

    def _ids(self, count: int) -> bytes:
        return self._random.integers(3, VOCAB_SIZE, size=count, dtype=np.uint32).tobytes()
