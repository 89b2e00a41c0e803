"""Exactness classes of bounded replay, bit for bit: against a full prefill, or one with a truncated window mask.

Checkpoint A: window 16; layers 0 to 5 are the encoder half, layer 6 is the last KV source.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from golden_runs import model, prompt_ids
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.models.batch import ForwardBatch, RowSet
    from dsserve.models.deepseek_v4.model import DeepseekV41Model

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
WINDOW, FIRST_DECODER_LAYER, NUM_LAYERS = 16, 6, 12
ENCODER, DECODER = range(FIRST_DECODER_LAYER), range(FIRST_DECODER_LAYER, NUM_LAYERS)
IDS = prompt_ids(CHECKPOINT, "len100")


@pytest.fixture(scope="module", params=["released", "fp32"])
def checkpoint_model(request: pytest.FixtureRequest) -> DeepseekV41Model:
    return model(CHECKPOINT, request.param)


class Result:
    """Logits of a prefill, and copies of everything it wrote."""

    def __init__(self, pool: Pool, request: Request, logits: Tensor) -> None:
        self.request, self.logits = request, logits
        self.full = pool.full_rows(request.planner.pages)
        length = len(request.prompt)
        self.positions = range(max(request.start, length - WINDOW), length)
        self.windows = [
            pool.window_rows(request.slot, layer, self.positions) for layer in range(NUM_LAYERS)
        ]

    def full_rows_from(self, pool: Pool, position: int, length: int) -> dict[str, Tensor]:
        """Compressed rows of complete groups between two positions."""
        rows = {}
        for name, pages in self.full.items():
            layer = int(name.split(".")[1])
            ratio = pool.runner.pools.layout.source_ratios[layer]
            rows[name] = pages.flatten(0, 1)[position // ratio : length // ratio]
        return rows


def new_pool(checkpoint_model: DeepseekV41Model, page_size: int = 2) -> Pool:
    return Pool(checkpoint_model, num_requests=4, page_size=page_size, stale=True, length=144)


def prefill(
    pool: Pool, ids: list[int], *, hit: int = 0, is_replay: bool, chunk: int | None = None
) -> Result:
    request = Request(pool, ids, hit=hit, is_replay=is_replay)
    pieces = []
    while request.num_left:
        size = chunk or request.num_left
        if is_replay and request.num_left - size < WINDOW:
            size = request.num_left
        pieces += merged_forward(pool, [request.prefill(size)])
    return Result(pool, request, torch.cat(pieces))


def write_prefix(pool: Pool, ids: list[int]) -> list[int]:
    """Compute a prefix cold and cache it; returns its pages."""
    request = Request(pool, ids)
    merged_forward(pool, [request.prefill(len(ids))])
    request.finish()
    return list(request.planner.pages)


def assert_rows_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []


def differing_layers(ours: Result, expected: Result, layers: range) -> list[int]:
    assert ours.positions == expected.positions
    return [i for i in layers if not torch.equal(ours.windows[i], expected.windows[i])]


def masked(rows: RowSet, floor: int) -> RowSet:
    """Rows at and after `floor` see no window key below it; the columns are the keys p - W + 1 .. p."""
    keys = rows.positions.unsqueeze(1) + torch.arange(1 - WINDOW, 1)
    is_cut = (keys < floor) & (rows.positions >= floor).unsqueeze(1)
    return replace(rows, window_index=rows.window_index.masked_fill(is_cut, -1))


def reference(pool: Pool, ids: list[int], *, hit: int = 0, is_decoder_cut: bool = True) -> Result:
    """All rows from position 0 through all layers, with windows cut by hand and cached rows left alone."""
    request = Request(pool, ids)
    start = hit - min(hit, WINDOW)
    if hit:
        assert request.planner.take_hit(ids[:hit]) == hit
    floor = max(start, len(ids) - WINDOW) if is_decoder_cut else start

    def change(batch: ForwardBatch) -> ForwardBatch:
        assert batch.tail_rows is None
        compress = {
            ratio: replace(
                rows, store=rows.store.masked_fill(rows.positions < hit // ratio * ratio, -1)
            )
            for ratio, rows in batch.compress.items()
        }
        return replace(
            batch,
            encoder=masked(batch.encoder, start),
            decoder=masked(batch.decoder, floor),
            compress=compress,
        )

    [logits] = merged_forward(pool, [request.prefill(len(ids))], change)
    request.start = start
    return Result(pool, request, logits)


@pytest.mark.parametrize("length", [1, 2, 9, 15, 16])
def test_up_to_a_window_decoder_replay_is_a_full_prefill(
    checkpoint_model: DeepseekV41Model, length: int
) -> None:
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    ours = prefill(pools[0], IDS[:length], is_replay=True)
    full = prefill(pools[1], IDS[:length], is_replay=False)
    assert torch.equal(ours.logits, full.logits)
    assert differing_layers(ours, full, range(NUM_LAYERS)) == []
    assert_rows_equal(
        ours.full_rows_from(pools[0], 0, length), full.full_rows_from(pools[1], 0, length)
    )


@pytest.mark.parametrize("length", [17, 33, 64, 99])
def test_beyond_a_window_global_rows_and_encoder_windows_are_those_of_a_full_prefill(
    checkpoint_model: DeepseekV41Model, length: int
) -> None:
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    ours = prefill(pools[0], IDS[:length], is_replay=True)
    full = prefill(pools[1], IDS[:length], is_replay=False)
    assert differing_layers(ours, full, ENCODER) == []
    assert_rows_equal(
        ours.full_rows_from(pools[0], 0, length), full.full_rows_from(pools[1], 0, length)
    )
    # The first decoder layer's windows are a projection of the encoder's output; from the next on they differ.
    assert differing_layers(ours, full, DECODER) == list(DECODER)[1:]
    assert not torch.equal(ours.logits, full.logits[-WINDOW:])


@pytest.mark.parametrize("length", [17, 33, 64, 99])
def test_decoder_replay_is_a_full_prefill_with_a_truncated_mask(
    checkpoint_model: DeepseekV41Model, length: int
) -> None:
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    ours = prefill(pools[0], IDS[:length], is_replay=True)
    truncated = reference(pools[1], IDS[:length])
    assert torch.equal(ours.logits, truncated.logits[-WINDOW:])
    assert differing_layers(ours, truncated, range(NUM_LAYERS)) == []


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
@pytest.mark.parametrize("length", [33, 90])
def test_chunks_without_tails_are_one_shot_decoder_replay(
    checkpoint_model: DeepseekV41Model, length: int, chunk: int
) -> None:
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    whole = prefill(pools[0], IDS[:length], is_replay=True)
    pieces = prefill(pools[1], IDS[:length], is_replay=True, chunk=chunk)
    assert torch.equal(pieces.logits, whole.logits)
    assert differing_layers(pieces, whole, range(NUM_LAYERS)) == []
    assert_rows_equal(
        pieces.full_rows_from(pools[1], 0, length), whole.full_rows_from(pools[0], 0, length)
    )


@pytest.mark.parametrize(
    ("hit", "length"), [(2, 12), (10, 12), (2, 17), (16, 17), (10, 40), (16, 40)]
)
def test_a_hit_within_a_window_is_a_cold_run(
    checkpoint_model: DeepseekV41Model, hit: int, length: int
) -> None:
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    write_prefix(pools[0], IDS[:hit])
    ours = prefill(pools[0], IDS[:length], hit=hit, is_replay=True)
    cold = prefill(pools[1], IDS[:length], is_replay=True)
    assert torch.equal(ours.logits, cold.logits)
    assert differing_layers(ours, cold, range(NUM_LAYERS)) == []
    assert_rows_equal(
        ours.full_rows_from(pools[0], 0, length), cold.full_rows_from(pools[1], 0, length)
    )


LONG_HITS = [(48, 100), (64, 90), (18, 64), (62, 63), (62, 70), (34, 35), (84, 99)]


@pytest.mark.parametrize(("hit", "length"), LONG_HITS)
def test_a_longer_hit_is_a_full_prefill_with_truncated_masks_on_the_cached_rows(
    checkpoint_model: DeepseekV41Model, hit: int, length: int
) -> None:
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    for pool in pools:
        write_prefix(pool, IDS[:hit])
    ours = prefill(pools[0], IDS[:length], hit=hit, is_replay=True)
    truncated = reference(pools[1], IDS[:length], hit=hit)
    assert torch.equal(ours.logits, truncated.logits[-len(ours.logits) :])
    assert len(ours.logits) == WINDOW
    assert differing_layers(ours, truncated, range(NUM_LAYERS)) == []
    assert_rows_equal(
        ours.full_rows_from(pools[0], 0, length), truncated.full_rows_from(pools[1], 0, length)
    )


@pytest.mark.parametrize(("hit", "length"), [(48, 100), (62, 70)])
def test_a_longer_hit_is_not_a_cold_run(
    checkpoint_model: DeepseekV41Model, hit: int, length: int
) -> None:
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    write_prefix(pools[0], IDS[:hit])
    ours = prefill(pools[0], IDS[:length], hit=hit, is_replay=True)
    cold = prefill(pools[1], IDS[:length], is_replay=True)
    assert not torch.equal(ours.logits, cold.logits)


@pytest.mark.parametrize("chunk", [None, 16, 33])
def test_a_hit_in_chunks_is_the_hit_in_one_shot(
    checkpoint_model: DeepseekV41Model, chunk: int | None
) -> None:
    results = []
    for size in (chunk, None):
        pool = new_pool(checkpoint_model)
        write_prefix(pool, IDS[:48])
        results.append(prefill(pool, IDS[:100], hit=48, is_replay=True, chunk=size))
    assert torch.equal(results[0].logits, results[1].logits)
    assert differing_layers(*results, range(NUM_LAYERS)) == []


def test_the_same_hit_twice_gives_the_same_and_shares_its_pages(
    checkpoint_model: DeepseekV41Model,
) -> None:
    pool = new_pool(checkpoint_model)
    write_prefix(pool, IDS[:48])
    first = prefill(pool, IDS[:90], hit=48, is_replay=True)
    second = prefill(pool, IDS[:90], hit=48, is_replay=True)
    assert torch.equal(first.logits, second.logits)
    assert differing_layers(first, second, range(NUM_LAYERS)) == []
    assert_rows_equal(first.full_rows_from(pool, 0, 90), second.full_rows_from(pool, 0, 90))


@pytest.mark.parametrize(("hit", "page_size"), [(2, 2), (16, 2), (16, 16), (48, 16), (64, 2)])
def test_shared_rows_never_change(
    checkpoint_model: DeepseekV41Model, hit: int, page_size: int
) -> None:
    """Not by the replay rows of a hit, nor by its new rows, nor by decoding, nor by the first owner going on."""
    pool = new_pool(checkpoint_model, page_size)
    pages = write_prefix(pool, IDS[:hit])
    assert len(pages) == hit // page_size
    before = pool.full_rows(pages)
    assert not any(bool((rows == 0xFF).all()) for rows in before.values())
    requests = [Request(pool, IDS[:length], hit=hit, is_replay=True) for length in (70, 90)]
    for request in requests:
        assert request.planner.pages[: len(pages)] == pages
        merged_forward(pool, [request.prefill(request.num_left)])
    for token in range(20):
        merged_forward(pool, [request.decode(token) for request in requests])
    assert_rows_equal(pool.full_rows(pages), before)


def test_a_whole_extend_without_a_hit_is_a_full_prefill(
    checkpoint_model: DeepseekV41Model,
) -> None:
    """A request that needs the logits of all rows runs them all through the decoder half, replay or not."""
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    request = Request(pools[0], IDS[:64], is_replay=True)
    plan = request.planner.step(IDS[:64], 0, [], tail_len=64)
    [whole] = merged_forward(pools[0], [plan])
    full = prefill(pools[1], IDS[:64], is_replay=False)
    assert torch.equal(whole, full.logits)


@pytest.mark.parametrize("hit", [16, 48])
def test_a_whole_extend_behind_a_hit_is_a_full_prefill_from_the_hit_on(
    checkpoint_model: DeepseekV41Model, hit: int
) -> None:
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    for pool in pools:
        write_prefix(pool, IDS[:hit])
    ours = prefill(pools[0], IDS[:90], hit=hit, is_replay=False)
    expected = reference(pools[1], IDS[:90], hit=hit, is_decoder_cut=False)
    assert torch.equal(ours.logits[-(90 - hit) :], expected.logits[hit:])
    if hit == WINDOW:
        cold = prefill(new_pool(checkpoint_model), IDS[:90], is_replay=False)
        assert torch.equal(ours.logits[-(90 - hit) :], cold.logits[hit:])


def test_decode_after_replay_sees_the_tail_only(checkpoint_model: DeepseekV41Model) -> None:
    """Decode rows behind a replay equal those behind the truncated reference, over more than a window."""
    pools = [new_pool(checkpoint_model) for _ in range(2)]
    for pool in pools:
        write_prefix(pool, IDS[:48])
    ours = Request(pools[0], IDS[:90], hit=48, is_replay=True)
    merged_forward(pools[0], [ours.prefill(ours.num_left)])
    theirs = reference(pools[1], IDS[:90], hit=48).request

    def change(batch: ForwardBatch) -> ForwardBatch:
        return replace(
            batch,
            encoder=masked(batch.encoder, 48 - WINDOW),
            decoder=masked(batch.decoder, 90 - WINDOW),
        )

    for token in range(20):
        [mine] = merged_forward(pools[0], [ours.decode(token)])
        [other] = merged_forward(pools[1], [theirs.decode(token)], change)
        assert torch.equal(mine, other), token
