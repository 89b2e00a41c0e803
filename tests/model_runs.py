"""Requests that run side by side in one `Runner`, planned by hand, for tests of the whole forward."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsserve import _native
from dsserve.debug.plans import RequestPlanner, merge_plans
from dsserve.worker.runner import Runner, RunnerSizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsserve.models.batch import ForwardBatch
    from dsserve.models.deepseek_v4.model import DeepseekV41Model
    from dsserve.worker.batch import PlanView

PAGE_SIZE = 16


class Pool:
    """A runner with its pools and the prefix cache that gives out pages."""

    def __init__(
        self,
        model: DeepseekV41Model,
        *,
        num_requests: int,
        page_size: int = PAGE_SIZE,
        stale: bool = False,
        length: int = 384,
    ) -> None:
        """Room for so many requests of `length` tokens; `stale` fills all storage with NaN and wild ids."""
        self.page_size = page_size
        self.num_columns = -(-length // page_size)
        num_pages = (num_requests + 1) * self.num_columns
        sizes = RunnerSizes(page_size, num_pages, num_requests + 1, self.num_columns, length)
        self.window = model.config.sliding_window
        self.runner = Runner(model, sizes, torch.device("cpu"))
        self.cache = _native.RadixCache(page_size=page_size, num_pages=num_pages)
        self.slots = itertools.count(1)
        if stale:
            fill_stale(self.runner)

    def full_rows(self, pages: Sequence[int]) -> dict[str, Tensor]:
        """Copies of the compressed rows and index keys on some pages, [pages, rows, bytes] by pool and layer."""
        rows = {}
        for name in ("main", "index"):
            for layer, pool in getattr(self.runner.pools, name).items():
                per_page = self.runner.pools.layout.rows_per_page(layer)
                paged = pool.view(-1, per_page, pool.shape[1])
                rows[f"{name}.{layer}"] = paged[list(pages)].clone()
        return rows

    def window_rows(self, slot: int, layer: int, positions: Sequence[int]) -> Tensor:
        """Copies of a request's window rows at some positions."""
        ring = self.runner.pools.layout.window_ring_rows
        index = [slot * ring + position % ring for position in positions]
        return self.runner.pools.window[layer][index].clone()


def fill_stale(runner: Runner) -> None:
    """What storage may hold before anybody wrote to it: NaN codes, NaN numbers, ids outside of the vocabulary."""
    pools = runner.pools
    for group in (pools.main, pools.index, pools.window):
        for pool in group.values():
            pool.fill_(0xFF)
    for ring in pools.tail.values():
        ring.fill_(torch.nan)
    pools.token_ring.fill_(10**9)


class Request:
    """One request in a slot of its own; plans its next step."""

    def __init__(
        self, pool: Pool, prompt: Sequence[int], *, hit: int = 0, is_replay: bool = False
    ) -> None:
        """Start at the first token, or behind a prefix that must be cached.

        Args:
            pool: Where it runs.
            prompt: Its ids.
            hit: Cached tokens to take.
            is_replay: Both bounded replays; else only the encoder replay that a hit needs.
        """
        self.prompt, self.is_replay = list(prompt), is_replay
        self.slot = next(pool.slots)
        self.planner = RequestPlanner(
            pool.cache,
            slot=self.slot,
            page_size=pool.page_size,
            num_columns=pool.num_columns,
        )
        self.window = pool.window
        if hit:
            assert self.planner.take_hit(prompt[:hit]) == hit
        self.start = self.position = hit - min(hit, pool.window)
        self.planner.floors.window, self.planner.floors.write = self.start, hit
        self.planner.floors.tail = self.start

    @property
    def num_left(self) -> int:
        """Rows of the prompt that have not run."""
        return max(len(self.prompt) - self.position, 0)

    def prefill(self, num_rows: int) -> PlanView:
        """The next rows of the prompt; with replay the last piece must hold a window."""
        first = self.position
        last = self.position = min(first + num_rows, len(self.prompt))
        tail_len = last - first
        if self.is_replay:
            is_last = last == len(self.prompt)
            tail_len = min(self.window, last - first) if is_last else 0
            if is_last:
                self.planner.floors.tail = max(self.start, last - self.window)
        return self.planner.step(
            self.prompt[first:last], first, self.prompt[:first], tail_len=tail_len
        )

    def decode(self, token: int) -> PlanView:
        """One token behind the prompt: an id, or -1 for what the step before drew."""
        first, self.position = self.position, self.position + 1
        return self.planner.step([token], first, (), tail_len=1)

    def finish(self) -> None:
        """Put the complete pages of the prompt into the prefix cache."""
        self.planner.insert(self.prompt)


def merged_forward(
    pool: Pool,
    plans: Sequence[PlanView],
    change: Callable[[ForwardBatch], ForwardBatch] = lambda batch: batch,
) -> list[Tensor]:
    """Logits of each plan's rows of the decoder half, all computed in one forward."""
    batch = change(pool.runner.prepare(merge_plans(plans), all_logits=True))
    logits = pool.runner.forward(batch)
    return list(logits.split([int(plan.tail_len.sum()) for plan in plans]))
