"""The whole forward: a request's logits do not depend on its mates, on its slot, on how it is cut, or on stale storage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from dsserve.worker.base import allocate_plan_buffers
from dsserve.worker.batch import PlanView
from golden_runs import model, prompt_ids
from model_runs import Pool, Request, fill_stale, merged_forward

if TYPE_CHECKING:
    from dsserve.models.deepseek_v4.model import DeepseekV41Model

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
NUM_TOKENS = 6


@pytest.fixture(scope="module", params=["released", "fp32"])
def checkpoint_model(request: pytest.FixtureRequest) -> DeepseekV41Model:
    return model(CHECKPOINT, request.param)


def prompts(count: int, seed: int, longest: int = 50) -> list[list[int]]:
    """Pieces of golden prompts, with all lengths from 1 on."""
    rng = random.Random(seed)
    whole = prompt_ids(CHECKPOINT, "len100") + prompt_ids(CHECKPOINT, "len90")
    starts = [rng.randrange(100) for _ in range(count)]
    return [[0, *whole[start : start + rng.randrange(longest)]] for start in starts]


class Continuation:
    """A request with the greedy tokens behind its prompt, step by step."""

    def __init__(self, pool: Pool, prompt: list[int], *, is_replay: bool = False) -> None:
        self.request = Request(pool, prompt, is_replay=is_replay)
        self.window, self.is_replay = pool.window, is_replay
        self.rows: list[torch.Tensor] = []
        self.num_decoded = 0

    @property
    def is_done(self) -> bool:
        return not self.request.num_left and self.num_decoded == NUM_TOKENS

    def next_plan(self, num_rows: int) -> PlanView:
        left = self.request.num_left
        if not left:
            self.num_decoded += 1
            return self.request.decode(int(self.rows[-1][-1].argmax()))
        if self.is_replay and left - num_rows < self.window:
            num_rows = left  # the last piece holds a window
        return self.request.prefill(num_rows)

    @property
    def logits(self) -> torch.Tensor:
        return torch.cat(self.rows)


def run_alone(
    checkpoint_model: DeepseekV41Model, prompt: list[int], *, is_replay: bool = False
) -> torch.Tensor:
    pool = Pool(checkpoint_model, num_requests=1)
    one = Continuation(pool, prompt, is_replay=is_replay)
    while not one.is_done:
        one.rows += merged_forward(pool, [one.next_plan(len(prompt))])
    return one.logits


def run_together(
    checkpoint_model: DeepseekV41Model,
    all_prompts: list[list[int]],
    rng: random.Random,
    *,
    is_replay: bool = False,
    stale: bool = False,
) -> list[torch.Tensor]:
    """A random part of the requests moves on in each step, in random order, prompts in random pieces."""
    pool = Pool(checkpoint_model, num_requests=len(all_prompts), stale=stale)
    running = [Continuation(pool, prompt, is_replay=is_replay) for prompt in all_prompts]
    everyone = list(running)
    while running:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        plans = [one.next_plan(rng.choice((1, 2, 5, 16, 33))) for one in chosen]
        for one, logits in zip(chosen, merged_forward(pool, plans), strict=True):
            one.rows.append(logits)
        running = [one for one in running if not one.is_done]
    return [one.logits for one in everyone]


def differing(ours: list[torch.Tensor], alone: list[torch.Tensor]) -> list[int]:
    return [i for i, pair in enumerate(zip(ours, alone, strict=True)) if not torch.equal(*pair)]


@pytest.mark.parametrize("count", [2, 17])
def test_ragged_batches_of_chunks_and_decode_rows_change_nothing(
    checkpoint_model: DeepseekV41Model, count: int
) -> None:
    all_prompts = prompts(count, seed=count)
    alone = [run_alone(checkpoint_model, prompt) for prompt in all_prompts]
    together = run_together(checkpoint_model, all_prompts, random.Random(count))
    assert differing(together, alone) == []


def test_ragged_batches_with_decoder_replay_change_nothing(
    checkpoint_model: DeepseekV41Model,
) -> None:
    all_prompts = prompts(8, seed=3)
    alone = [run_alone(checkpoint_model, prompt, is_replay=True) for prompt in all_prompts]
    together = run_together(checkpoint_model, all_prompts, random.Random(3), is_replay=True)
    assert differing(together, alone) == []


@pytest.mark.parametrize("is_replay", [False, True])
def test_stale_storage_is_never_seen(checkpoint_model: DeepseekV41Model, is_replay: bool) -> None:
    all_prompts = prompts(4, seed=4)
    alone = [run_alone(checkpoint_model, prompt, is_replay=is_replay) for prompt in all_prompts]
    together = run_together(
        checkpoint_model, all_prompts, random.Random(4), is_replay=is_replay, stale=True
    )
    assert all(bool(logits.isfinite().all()) for logits in together)
    assert differing(together, alone) == []


def test_storage_of_others_is_never_seen_or_touched(checkpoint_model: DeepseekV41Model) -> None:
    """One request between slots and pages full of NaN: it reads none of them and writes none of them."""
    prompt = prompt_ids(CHECKPOINT, "len33")
    pool = Pool(checkpoint_model, num_requests=4, stale=True)
    pool.slots = iter([3])
    request = Request(pool, prompt)
    [logits] = merged_forward(pool, [request.prefill(len(prompt))])
    fresh = Pool(checkpoint_model, num_requests=1)
    [expected] = merged_forward(fresh, [Request(fresh, prompt).prefill(len(prompt))])
    assert torch.equal(logits, expected)
    others = [page for page in range(pool.cache.num_pages + 1) if page not in request.planner.pages]
    for name, rows in pool.full_rows(others).items():
        assert bool((rows == 0xFF).all()), name
    ring = pool.runner.pools.layout.window_ring_rows
    for layer, rows in pool.runner.pools.window.items():
        by_slot = rows.view(-1, ring, rows.shape[1])
        assert bool((by_slot[[0, 1, 2, 4]] == 0xFF).all()), layer


def test_a_request_with_nan_hurts_only_itself(checkpoint_model: DeepseekV41Model) -> None:
    """Its window rows become NaN codes; mates in the same forward, before or behind it, are as without it."""
    prompt = prompt_ids(CHECKPOINT, "len33")
    pool = Pool(checkpoint_model, num_requests=3)
    requests = [Request(pool, prompt) for _ in range(3)]
    ring = pool.runner.pools.layout.window_ring_rows
    merged_forward(pool, [requests[0].prefill(20)])
    for rows in pool.runner.pools.window.values():
        rows[requests[0].slot * ring : (requests[0].slot + 1) * ring] = 0xFF
    broken, good, _ = merged_forward(pool, [request.prefill(9) for request in requests])
    assert bool(broken.isnan().all())
    alone = Pool(checkpoint_model, num_requests=1)
    [expected] = merged_forward(alone, [Request(alone, prompt).prefill(9)])
    assert torch.equal(good, expected)
    rest = merged_forward(pool, [requests[0].prefill(4), requests[1].prefill(9)])
    assert bool(rest[1].isfinite().all())


def test_padding_rows_change_nothing(checkpoint_model: DeepseekV41Model) -> None:
    """Rows of slot 0 read and write the dummy page only."""
    prompt = prompt_ids(CHECKPOINT, "len64")
    pool = Pool(checkpoint_model, num_requests=1)
    request = Request(pool, prompt)
    rows = []
    padding = padding_plan()
    for _ in range(4):
        rows += merged_forward(pool, [padding, request.prefill(16), padding])[1:2]
    alone = Pool(checkpoint_model, num_requests=1)
    whole = merged_forward(alone, [Request(alone, prompt).prefill(64)])
    assert torch.equal(torch.cat(rows), whole[0])


def padding_plan() -> PlanView:
    """One decode row of the padding slot."""
    buffers = allocate_plan_buffers({"requests": 1, "rows": 1, "deltas": 0, "slots": 0})
    buffers["header"][1:4] = (2, 1, 1)
    buffers["cu_seqlens"][:] = (0, 1)
    buffers["tail_len"][0] = 1
    buffers["history_ids"][:] = -2
    return PlanView.of(buffers)


def test_a_step_without_rows_is_a_step_like_any_other(checkpoint_model: DeepseekV41Model) -> None:
    pool = Pool(checkpoint_model, num_requests=1, stale=True)
    buffers = allocate_plan_buffers({"requests": 0, "rows": 0, "deltas": 0, "slots": 0})
    batch = pool.runner.prepare(PlanView.of(buffers))
    assert pool.runner.forward(batch).shape == (0, checkpoint_model.config.vocab_size)


def test_an_open_chunk_has_no_decoder_rows_and_the_last_has_a_window(
    checkpoint_model: DeepseekV41Model,
) -> None:
    """Open chunks alone, which leave the decoder half without rows, and mixed with a last one."""
    pool = Pool(checkpoint_model, num_requests=2)
    first = Request(pool, prompt_ids(CHECKPOINT, "len100"), is_replay=True)
    second = Request(pool, prompt_ids(CHECKPOINT, "len17"), is_replay=True)
    [nothing] = merged_forward(pool, [first.prefill(40)])
    assert nothing.shape[0] == 0
    still_nothing, window = merged_forward(pool, [first.prefill(40), second.prefill(17)])
    assert (still_nothing.shape[0], window.shape[0]) == (0, 16)
    [tail] = merged_forward(pool, [first.prefill(20)])
    assert tail.shape[0] == 16


def test_placeholders_read_what_was_sampled(checkpoint_model: DeepseekV41Model) -> None:
    """Decode rows that take their id from the token ring equal rows that are told it."""
    prompt = prompt_ids(CHECKPOINT, "len17")
    told = run_alone(checkpoint_model, prompt)
    pool = Pool(checkpoint_model, num_requests=1)
    request = Request(pool, prompt)
    batch = pool.runner.prepare(request.prefill(17))
    rows = [pool.runner.forward(batch)]
    for _ in range(NUM_TOKENS):
        pool.runner.keep_sampled(batch, rows[-1].argmax(1))
        batch = pool.runner.prepare(request.decode(-1))
        rows.append(pool.runner.forward(batch))
    assert torch.equal(torch.cat(rows), told[16:])


def test_what_a_slot_held_before_is_never_seen(checkpoint_model: DeepseekV41Model) -> None:
    """A second request in a used slot, on used pages, equals one in fresh storage."""
    long, short = prompt_ids(CHECKPOINT, "len100"), prompt_ids(CHECKPOINT, "len33")
    pool = Pool(checkpoint_model, num_requests=1)
    first = Request(pool, long)
    merged_forward(pool, [first.prefill(100)])
    pool.cache.free(np.array(first.planner.pages, dtype=np.uint32))
    pool.slots = iter([first.slot])
    second = Request(pool, short)
    [reused] = merged_forward(pool, [second.prefill(33)])
    fresh = Pool(checkpoint_model, num_requests=1)
    [expected] = merged_forward(fresh, [Request(fresh, short).prefill(33)])
    assert torch.equal(reused, expected)


def test_stale_filling_covers_every_pool(checkpoint_model: DeepseekV41Model) -> None:
    pool = Pool(checkpoint_model, num_requests=1)
    fill_stale(pool.runner)
    no_storage = {"layout", "rings"}
    names = {name for name in vars(pool.runner.pools) if name not in no_storage}
    assert names == {"main", "index", "window", "tail", "token_ring"}
