"""Attention over decoded window rings: any bytes in the pool, any rows of a request, the bits of the chain."""

from __future__ import annotations

import pytest
import torch

from dsserve_kernels.attention import numpy_window
from dsserve_kernels.attention.window_index import WindowIndex
from dsserve_kernels.fused import chains
from dsserve_kernels.kvcache.decoded_rings import DecodedRings
from dsserve_kernels.reference.kvcache import load_window_rows, store_window_rows
from fused_cases import REFERENCE, RING_ROWS, rings_pool
from kernel_sources import DIM, Source, pool, shared

HEADS = 4


def attend(
    body, stored: torch.Tensor, index: WindowIndex, rings: DecodedRings, seed: int = 0
) -> torch.Tensor:
    source = Source(seed)
    rows = len(index.window_store)
    q = source.normal(rows, HEADS, DIM, dtype=torch.bfloat16)
    latent = source.normal(rows, DIM, dtype=torch.bfloat16)
    main = source.picks(rows, 8, 40)
    return body(
        REFERENCE, q, latent, stored, index, rings, pool("main"), main, shared("sink"),
        scale=0.125, round_weights=True,
    )  # fmt: skip


def verify_index(
    ring: int, context: list[int], count: int, *, is_causal: bool, is_stored: bool
) -> WindowIndex:
    """`count` new rows of one request behind some rows of its ring."""
    first = ring * RING_ROWS
    old = torch.arange(len(context)).expand(count, -1)
    new = len(context) + torch.arange(count).expand(count, -1)
    if is_causal:
        new = torch.where(torch.arange(count) <= torch.arange(count).unsqueeze(1), new, -1)
    free = [row for row in range(RING_ROWS) if row not in context][:count]
    store = torch.tensor([first + row for row in free]) if is_stored else torch.full((count,), -1)
    return WindowIndex(
        window_index=torch.cat((old, new), dim=1),
        context_index=torch.tensor([first + row for row in context], dtype=torch.int64),
        window_store=store,
        row_request=torch.zeros(count, dtype=torch.int64),
        ring_rows=RING_ROWS,
    )


@pytest.fixture
def without_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the chain was used")

    monkeypatch.setattr(numpy_window.chains, "window_attention", refuse)


@pytest.mark.parametrize(("is_causal", "is_stored"), [(True, True), (False, False)])
@pytest.mark.parametrize("context", [[], [3], [5, 6, 7, 0, 1]])
def test_several_rows_of_a_request_have_the_bits_of_the_chain(
    monkeypatch: pytest.MonkeyPatch, context: list[int], is_causal: bool, is_stored: bool
) -> None:
    stored, same = rings_pool().clone(), rings_pool().clone()
    index = verify_index(2, context, 5, is_causal=is_causal, is_stored=is_stored)
    expected = attend(chains.window_attention, same, index, DecodedRings(RING_ROWS, 4))
    monkeypatch.setattr(numpy_window.chains, "window_attention", None)
    rings = DecodedRings(RING_ROWS, 4)
    for _ in range(2):
        assert torch.equal(attend(numpy_window.window_attention, stored, index, rings), expected)
        assert torch.equal(stored, same)


def test_rows_that_somebody_else_wrote_are_seen(without_chain: None) -> None:
    stored, rings = rings_pool().clone(), DecodedRings(RING_ROWS, 4)
    index = verify_index(1, [0, 1, 2], 1, is_causal=True, is_stored=True)
    before = attend(numpy_window.window_attention, stored, index, rings)
    changed = torch.tensor([RING_ROWS + 1])
    store_window_rows(stored, changed, Source(5).normal(1, DIM, dtype=torch.bfloat16))
    after = attend(numpy_window.window_attention, stored, index, rings)
    fresh = attend(numpy_window.window_attention, stored.clone(), index, DecodedRings(RING_ROWS, 4))
    assert not torch.equal(before, after)
    assert torch.equal(after, fresh)


def test_broken_rows_matter_to_those_who_see_them_alone() -> None:
    """The last row of each ring is NaN codes: unseen it does no harm, seen it breaks its row as in the chain."""
    stored = rings_pool().clone()
    stored[RING_ROWS - 1] = 0xFF
    for context in ([0, 1], [0, RING_ROWS - 1]):
        index = verify_index(0, context, 1, is_causal=True, is_stored=False)
        ours = attend(numpy_window.window_attention, stored, index, DecodedRings(RING_ROWS, 4))
        theirs = attend(chains.window_attention, stored, index, DecodedRings(RING_ROWS, 4))
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert bool(ours.isnan().any()) == (RING_ROWS - 1 in context)


def test_more_requests_than_rings_are_remembered_are_the_chain_s() -> None:
    stored = rings_pool().clone()
    index = verify_index(0, [0], 1, is_causal=True, is_stored=False)
    assert attend(numpy_window.window_attention, stored, index, DecodedRings(RING_ROWS, 0)).shape


def test_rings_hold_what_the_pool_holds_and_forget_the_oldest() -> None:
    stored, rings = rings_pool().clone(), DecodedRings(RING_ROWS, 2)
    for number in (0, 1, 2, 1, 0, 0, 2):
        rows = torch.arange(number * RING_ROWS, (number + 1) * RING_ROWS)
        stored[rows[3]] = stored[rows[(number + 4) % 7]]
        ring = rings.ring(stored.numpy(), number)
        values = load_window_rows(stored, rows, torch.float32)
        assert ring.is_broken.tolist() == [False] * (RING_ROWS - 1) + [True]
        assert torch.equal(ring.values[:-1].float(), values[:-1])
        assert not ring.values[-1].any()
    ring.put(RING_ROWS - 1, stored.numpy()[0], values[0].numpy())
    assert ring.num_broken == 0
