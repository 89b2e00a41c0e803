"""Scheduler steps: decode, a long prompt beside it, and its arrival."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import no_collection
from benchmarks.peers.sizes import VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.rows import Rows
    from benchmarks.peers.schedulers import SchedulerKind, Steps
    from benchmarks.peers.sizes import Sizes

WARM_UP = 20
#: Running requests -> bar of a step in us.
STEP_US = {64: 20.0, 256: 80.0, 1024: 300.0}
MIXED_OVER_PURE_US = 100.0
ARRIVAL_US = 500.0


def measure(kinds: Sequence[SchedulerKind], sizes: Sizes, rows: Rows) -> None:
    """Run every number of running requests."""
    for running in sizes.running:
        random = np.random.default_rng(running)
        prompts = [
            random.integers(3, VOCAB_SIZE, sizes.prompt_tokens, dtype=np.uint32)
            for _ in range(running)
        ]
        benches = {kind.name: kind.build(running, sizes) for kind in kinds}
        for bench in benches.values():
            bench.start(prompts)
            for _ in range(WARM_UP):
                bench.step()
        for _ in range(sizes.step_rounds):
            for name, bench in benches.items():
                with no_collection():
                    _round(name, bench, running, sizes, random, rows)
        for bench in benches.values():
            bench.check()


def _round(
    name: str,
    bench: Steps,
    running: int,
    sizes: Sizes,
    random: np.random.Generator,
    rows: Rows,
) -> None:
    timings = np.array([bench.step() for _ in range(sizes.steps)]) / 1e3
    plan, result = (float(value) for value in np.median(timings, axis=0))
    pure = float(np.median(timings.sum(axis=1)))
    load = f"{running:,} running"
    rows.add(f"decode step, {load}", "us", name, pure, bar=STEP_US.get(running))
    rows.add(f"decode plan, {load}", "us", name, plan)
    rows.add(f"decode result, {load}", "us", name, result)
    prompt = random.integers(3, VOCAB_SIZE, sizes.long_tokens, dtype=np.uint32)
    submit, admit = (value / 1e3 for value in bench.arrive(prompt))
    mixed = []
    while bench.is_prefilling:
        mixed.append(sum(bench.step()) / 1e3)
    bench.end_long()
    length = f"{sizes.long_tokens // 1024}K"
    rows.add(
        f"arrival of {length}, {load}",
        "us",
        name,
        submit + max(0.0, admit - plan),
        bar=ARRIVAL_US,
        note="submission, and the plan that admits it beyond a usual plan",
    )
    rows.add(f"submission of {length}, {load}", "us", name, submit)
    rows.add(
        f"mixed step, {load} + {length}",
        "us",
        name,
        statistics.mean(mixed),
        note="mean over the chunks",
    )
    rows.add(
        f"mixed over pure step, {load}",
        "us",
        name,
        statistics.median(mixed) - pure,
        bar=MIXED_OVER_PURE_US,
        note="medians",
    )
