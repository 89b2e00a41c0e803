"""Floors row by row, and log-probabilities of prompts from whole extends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsserve.debug.plans import merge_plans
from dsserve.replay.floors import row_floors
from dsserve.replay.prompt_rows import PromptRows, PromptWish
from golden_runs import model, prompt_ids
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
WINDOW = 16
IDS = prompt_ids(CHECKPOINT, "len90")


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_every_row_has_the_floors_of_its_request(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    tails = [data.draw(st.integers(0, length)) for length in lengths]
    floors = {
        name: np.array([data.draw(st.integers(0, 50)) for _ in lengths])
        for name in ("window_floor", "tail_floor", "write_floor")
    }
    rows = row_floors(cu_seqlens=np.cumsum([0, *lengths]), tail_len=np.array(tails), **floors)
    expected_encoder = [
        f for f, n in zip(floors["window_floor"], lengths, strict=True) for _ in range(n)
    ]
    expected_write = [
        f for f, n in zip(floors["write_floor"], lengths, strict=True) for _ in range(n)
    ]
    expected_decoder = [
        f for f, n in zip(floors["tail_floor"], tails, strict=True) for _ in range(n)
    ]
    assert rows.encoder.tolist() == expected_encoder
    assert rows.write.tolist() == expected_write
    assert rows.decoder.tolist() == expected_decoder


def test_windows_show_exactly_the_keys_from_the_floor_of_a_row_on() -> None:
    """One step of a replayed hit, a cold prompt and a decode row: every row with its own floor."""
    pool = Pool(model(CHECKPOINT, "released"), num_requests=4, page_size=2)
    cached = Request(pool, IDS[:48])
    merged_forward(pool, [cached.prefill(48)])
    cached.finish()
    hit = Request(pool, IDS[:70], hit=48, is_replay=True)
    cold = Request(pool, IDS[:30], is_replay=True)
    plans = [hit.prefill(90), cold.prefill(90), cached.decode(5)]
    batch = pool.runner.prepare(merge_plans(plans))
    for rows, floors in (
        (batch.encoder, [48 - WINDOW, 0, 0]),
        (batch.decoder, [70 - WINDOW, 30 - WINDOW, 0]),
    ):
        assert rows.floor.tolist() == [floors[i] for i in rows.row_request.tolist()]
        keys = rows.positions.unsqueeze(1) + torch.arange(1 - WINDOW, 1)
        assert torch.equal(rows.window_index >= 0, keys >= rows.floor.unsqueeze(1))


def log_probabilities(pool: Pool, request: Request, start: int, chunk: int) -> Tensor:
    """Of the tokens behind `start`, from a whole extend in chunks."""
    wish = {request.slot: PromptWish(np.array(request.prompt), start)}
    values = []
    while request.num_left:
        plan = request.prefill(chunk)
        rows = PromptRows.of(plan, wish)
        batch = pool.runner.prepare(plan, prompt_rows=rows)
        own, found = rows.split(pool.runner.forward(batch))
        assert own.shape[0] == 1
        values.append(found)
    return torch.cat(values)


def expected_values(ids: list[int]) -> Tensor:
    """From the logits of all rows of a full prefill."""
    pool = Pool(model(CHECKPOINT, "released"), num_requests=1, page_size=2)
    request = Request(pool, ids)
    [logits] = merged_forward(pool, [request.prefill(len(ids))])
    targets = torch.tensor(ids[1:]).unsqueeze(1)
    return logits[:-1].float().log_softmax(1).gather(1, targets).squeeze(1)


@pytest.mark.parametrize(("start", "chunk"), [(0, 90), (0, 33), (41, 17)])
def test_prompt_log_probabilities_are_those_of_a_full_prefill(start: int, chunk: int) -> None:
    pool = Pool(model(CHECKPOINT, "released"), num_requests=1, page_size=2)
    found = log_probabilities(pool, Request(pool, IDS), start, chunk)
    assert torch.equal(found, expected_values(IDS)[start:])


@pytest.mark.parametrize("hit", [16, 48])
def test_behind_a_hit_they_are_those_of_a_full_prefill_from_the_hit_on(hit: int) -> None:
    """The hit ends at or before the first row that is wanted; up to a window it is exactly the cold run."""
    pool = Pool(model(CHECKPOINT, "released"), num_requests=3, page_size=2)
    first = Request(pool, IDS[:hit])
    merged_forward(pool, [first.prefill(hit)])
    first.finish()
    start = hit + 3
    request = Request(pool, IDS, hit=hit)
    found = log_probabilities(pool, request, start, 90)
    again = Request(pool, IDS, hit=hit)
    [logits] = merged_forward(pool, [again.prefill(len(IDS))])
    targets = torch.tensor(IDS[start + 1 :]).unsqueeze(1)
    rows = logits[start - again.start : -1]
    assert torch.equal(found, rows.float().log_softmax(1).gather(1, targets).squeeze(1))
    if hit <= WINDOW:
        assert torch.equal(found, expected_values(IDS)[start:])


def test_requests_beside_it_get_the_logits_they_would_get_alone() -> None:
    pool = Pool(model(CHECKPOINT, "released"), num_requests=3, page_size=2)
    asking, other = Request(pool, IDS[:40]), Request(pool, IDS[:50], is_replay=True)
    plan = merge_plans([other.prefill(50), asking.prefill(40)])
    rows = PromptRows.of(plan, {asking.slot: PromptWish(np.array(asking.prompt), 10)})
    assert rows.requests.tolist() == [1] * 29
    assert rows.positions.tolist() == list(range(11, 40))
    own, found = rows.split(pool.runner.forward(pool.runner.prepare(plan, prompt_rows=rows)))
    assert torch.equal(found, expected_values(IDS[:40])[10:])
    alone = Request(pool, IDS[:50], is_replay=True)
    [logits] = merged_forward(pool, [alone.prefill(50)])
    assert torch.equal(own[0], logits[-1])


def test_a_request_that_wants_rows_must_be_a_whole_extend() -> None:
    pool = Pool(model(CHECKPOINT, "released"), num_requests=1, page_size=2)
    request = Request(pool, IDS, is_replay=True)
    plan = request.prefill(90)
    with pytest.raises(ValueError, match="no whole extend"):
        PromptRows.of(plan, {request.slot: PromptWish(np.array(IDS), 0)})
