"""How much CPU time does one step of the model cost: decoding 1 and 8 requests, and verifying a few rows of one?

Time of the process, not of the clock: other work on the machine disturbs it little. The forward and the host part of
a step are measured, not the step loop. `DSSERVE_BENCH_MODEL` names a checkpoint other than the embedded one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.record import Figure
from dsserve import _native
from dsserve.cli.default_model import embedded_model
from dsserve.config.model import load_model_config
from dsserve.debug.plans import RequestPlanner
from dsserve.worker.batch import PlanView
from dsserve.worker.runner import Runner, RunnerSizes, load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE_SIZE = 64
CONTEXTS = (160, 1024)
STEPS = 40
WARM_STEPS = 4
VERIFY_ROWS = 6
STREAMS = 8


class Requests:
    """Requests with a prompt of random ids in their windows and pools; each decodes on its own."""

    def __init__(self, runner: Runner, cache: _native.RadixCache, count: int, context: int) -> None:
        """Prefill `count` prompts of `context` tokens."""
        self._runner = runner
        sizes = runner.sizes
        self._planners = [
            RequestPlanner(
                cache, slot=1 + i, page_size=sizes.page_size, num_columns=sizes.num_columns
            )
            for i in range(count)
        ]
        self.position = context
        random = np.random.default_rng(context)
        for planner in self._planners:
            ids = random.integers(3, runner.model.config.vocab_size, context).tolist()
            runner.forward(runner.prepare(planner.step(ids, 0, (), tail_len=context)))
        self._next = random.integers(3, runner.model.config.vocab_size, 64).tolist()

    def step(self, num_rows: int) -> None:
        """Run so many new rows of every request in one step, and keep the arg-max for the next one."""
        ids = self._next[:num_rows]
        plans = [
            planner.step(ids, self.position, (), tail_len=num_rows) for planner in self._planners
        ]
        started = time.process_time()
        batch = self._runner.prepare(merge(plans), all_logits=num_rows > 1)
        logits = self._runner.forward(batch)
        self.seconds = time.process_time() - started
        self.position += num_rows
        self._next[0] = int(logits[0].argmax())


def merge(plans: Sequence[PlanView]) -> PlanView:
    """One plan of several requests' plans."""
    if len(plans) == 1:
        return plans[0]
    names = PlanView.__dataclass_fields__
    values = {name: [getattr(plan, name) for plan in plans] for name in names}
    lengths = np.concatenate([np.diff(part) for part in values["cu_seqlens"]])
    merged: dict[str, Any] = {
        name: parts[0] if name in ("step_id", "phase") else np.concatenate(parts)
        for name, parts in values.items()
        if name != "cu_seqlens"
    }
    return PlanView(cu_seqlens=np.concatenate(([0], np.cumsum(lengths))), **merged)


def build_runner() -> tuple[Runner, Callable[[], _native.RadixCache]]:
    """A runner with room for the largest case, and a maker of page pools."""
    torch.set_num_threads(1)
    path = Path(os.environ.get("DSSERVE_BENCH_MODEL") or embedded_model())
    config = load_model_config(path, {})
    length = max(CONTEXTS) + (STEPS + WARM_STEPS) * VERIFY_ROWS
    columns = -(-length // PAGE_SIZE)
    sizes = RunnerSizes(PAGE_SIZE, (STREAMS + 1) * columns, STREAMS + 1, columns, length)
    model = load_model(
        path, config, numerics="released", context_length=length, device=torch.device("cpu")
    )
    runner = Runner(model, sizes, torch.device("cpu"))
    return runner, lambda: _native.RadixCache(page_size=PAGE_SIZE, num_pages=sizes.num_pages)


def measure() -> list[Figure]:
    """Milliseconds of CPU a step, by rows and context."""
    runner, make_cache = build_runner()
    figures = []
    for context in CONTEXTS:
        for count, rows in ((1, 1), (STREAMS, 1), (1, VERIFY_ROWS)):
            requests = Requests(runner, make_cache(), count, context)
            samples = []
            for number in range(WARM_STEPS + STEPS):
                requests.step(rows)
                if number >= WARM_STEPS:
                    samples.append(1e3 * requests.seconds)
            p50, p99 = (float(value) for value in np.percentile(samples, [50, 99]))
            settings = {"requests": count, "rows_each": rows, "context": context}
            name = f"decode_step.{count}x{rows}_at_{context}"
            figures.append(Figure(name, "ms CPU", p50, p50, p99, STEPS, settings=settings))
    return figures
