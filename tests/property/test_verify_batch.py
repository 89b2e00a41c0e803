"""Index tensors built on the device from relay buffers are those the host builds for the same lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsserve.config.model import load_model_config
from dsserve.kv.layout import TAIL_RING, TOKEN_RING, kv_layout
from dsserve.worker.base import PHASE_DECODE, PHASE_PREFILL, PHASE_VERIFY
from dsserve.worker.batch import FROM_RING, BatchBuilder, PlanView
from dsserve.worker.relay import Relay
from dsserve.worker.verify import DeviceBatchBuilder, StepInputs

if TYPE_CHECKING:
    from dsserve.models.batch import CompressRows, ForwardBatch, RowSet

CONFIG = load_model_config(Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a")
WINDOW, PAGE, COLUMNS, SLOTS = CONFIG.sliding_window, 8, 12, 7
LONGEST = PAGE * COLUMNS
LAYOUT = kv_layout(CONFIG, PAGE)
CPU = torch.device("cpu")


@st.composite
def plans(draw: st.DrawFn) -> tuple[PlanView, np.ndarray]:
    """A step of any phase at its true positions, and how far each position in the plan is beyond the truth."""
    phase = draw(st.sampled_from([PHASE_PREFILL, PHASE_DECODE, PHASE_VERIFY]))
    batch = draw(st.integers(1, 5))
    slots = draw(st.permutations(range(1, SLOTS)))[:batch]
    start, lengths, tails, drafts, seeds, samples = [], [], [], [], [], []
    window_floor, write_floor, tail_floor = [], [], []
    for index in range(batch):
        is_prompt = phase == PHASE_PREFILL and (index == 0 or draw(st.booleans()))
        if is_prompt:
            first = draw(st.integers(0, LONGEST // 2))
            length = draw(st.integers(1, LONGEST - first - 8))
            tail = draw(st.sampled_from([0, min(WINDOW, length), length]))
            # Window floors of prompts lie at or below their first row.
            floor = draw(st.integers(0, first))
            drafts.append(0)
            seeds.append([first - 3 + i if first - 3 + i >= 0 else -1 for i in range(3)])
        else:
            first = draw(st.integers(1, LONGEST - 20))
            drafts.append(draw(st.integers(0, 5)) if phase == PHASE_VERIFY else 0)
            length = tail = drafts[-1] + 1
            floor = draw(st.integers(0, first))
            seeds.append([FROM_RING] * 3)
        start.append(first)
        lengths.append(length)
        tails.append(tail)
        window_floor.append(floor)
        tail_floor.append(draw(st.integers(floor, max(floor, first))))
        write_floor.append(draw(st.integers(0, first // 2)) * 2)
        samples.append(not is_prompt or tail > 0)
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(start, lengths, strict=True)])
    continues = np.array([seed[0] == FROM_RING for seed in seeds])
    is_known = np.repeat(~continues, lengths)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    pages = rng.permutation(np.arange(1, batch * COLUMNS + 1))
    deltas = [
        (slot, column, pages[index * COLUMNS + column])
        for index, slot in enumerate(slots)
        for column in range(COLUMNS)
    ]
    plan = PlanView(
        step_id=1,
        phase=phase,
        request_id=np.arange(batch, dtype=np.uint64),
        request_slot=np.array(slots),
        cu_seqlens=cu_seqlens,
        start_position=np.array(start),
        tail_len=np.array(tails),
        draft_len=np.array(drafts),
        window_floor=np.array(window_floor),
        write_floor=np.array(write_floor),
        tail_floor=np.array(tail_floor),
        samples=np.array(samples),
        history_ids=np.array(seeds),
        token_ids=np.where(is_known, rng.integers(0, 500, len(positions)), -1),
        positions=positions,
        page_deltas=np.array(deltas),
        released_slots=np.zeros(0, np.int64),
    )
    ahead = np.where(continues, rng.integers(0, 7, batch), 0)
    return plan, ahead


def built(plan: PlanView, ahead: np.ndarray) -> tuple[ForwardBatch, ForwardBatch]:
    """By the host from the truth, by the device from upper bounds and the committed lengths."""
    host = BatchBuilder(CONFIG, LAYOUT, num_slots=SLOTS, num_columns=COLUMNS)
    relay = Relay(
        CONFIG, num_slots=SLOTS, num_columns=COLUMNS, gamma=5, keeps_logits=False, device=CPU
    )
    relay.committed_len.fill_(10**6)
    slots = torch.from_numpy(plan.request_slot)
    relay.committed_len[slots] = torch.where(
        torch.from_numpy(plan.continues), torch.from_numpy(plan.start_position), 10**6
    )
    relay.write_pages(torch.from_numpy(plan.page_deltas))
    told = replace(
        plan,
        start_position=plan.start_position + ahead,
        positions=plan.positions + ahead[plan.row_request],
    )
    device = DeviceBatchBuilder(CONFIG, LAYOUT, relay)
    return (
        host.build(plan, all_logits=plan.phase == PHASE_VERIFY),
        device.build(StepInputs.of(told, CPU)),
    )


def assert_same_rows(ours: RowSet, expected: RowSet) -> None:
    names = ("positions", "row_request", "window_index", "context_index", "window_store", "floor")
    for name in names:
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    for ratio, visible in expected.num_visible.items():
        assert torch.equal(ours.num_visible[ratio], visible)


def writes(index: torch.Tensor, values: torch.Tensor, padding: int) -> dict[int, int]:
    """What a scatter leaves outside of the padding slot, whose rows are the first ones."""
    pairs = zip(index.tolist(), values.tolist(), strict=True)
    return {where: value for where, value in pairs if where >= padding}


def assert_same_compress(ours: CompressRows, expected: CompressRows) -> None:
    stored, wanted = ours.store >= 0, expected.store >= 0
    for name in ("rows", "first", "positions", "store"):
        assert torch.equal(getattr(ours, name)[stored], getattr(expected, name)[wanted]), name
    kept = [writes(rows.tail_store, rows.tail_rows, TAIL_RING) for rows in (ours, expected)]
    assert kept[0] == kept[1]


@settings(max_examples=150, deadline=None)
@given(plans())
def test_the_device_lays_out_a_step_as_the_host_does(case: tuple[PlanView, np.ndarray]) -> None:
    plan, ahead = case
    expected, ours = built(plan, ahead)
    assert_same_rows(ours.encoder, expected.encoder)
    assert_same_rows(ours.decoder, expected.decoder)
    assert (ours.tail_rows is None) == (expected.tail_rows is None)
    if ours.tail_rows is not None and expected.tail_rows is not None:
        assert torch.equal(ours.tail_rows, expected.tail_rows)
    for name in ("token_ids", "ring_index", "history_index", "logit_rows", "sample_index"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    stored = [writes(batch.ring_store, batch.ring_rows, TOKEN_RING) for batch in (ours, expected)]
    assert stored[0] == stored[1]
    seeds = [writes(batch.seed_index, batch.seed_ids, TOKEN_RING) for batch in (ours, expected)]
    assert seeds[0] == seeds[1]
    for ratio, rows in expected.compress.items():
        assert_same_compress(ours.compress[ratio], rows)
        index, wanted = ours.source_index[ratio], expected.source_index[ratio]
        assert torch.equal(index[:, : wanted.shape[1]], wanted)
        assert bool((index[:, wanted.shape[1] :] == 0).all())
        assert ours.max_visible[ratio] == index.shape[1]


@settings(max_examples=60, deadline=None)
@given(plans(), st.data())
def test_fewer_verified_rows_are_laid_out_as_if_they_were_all(
    case: tuple[PlanView, np.ndarray], data: st.DataObject
) -> None:
    """Ragged verification: lengths that only the device knows, of a sum that the host knows."""
    plan, ahead = case
    if plan.phase != PHASE_VERIFY:
        return
    drafts = np.array([data.draw(st.integers(0, int(most))) for most in plan.draft_len])
    lengths = drafts + 1
    cut = replace(
        plan,
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))),
        draft_len=drafts,
        tail_len=lengths,
        token_ids=np.full(lengths.sum(), -1),
        positions=np.concatenate(
            [np.arange(s, s + n) for s, n in zip(plan.start_position, lengths, strict=True)]
        ),
    )
    _, expected = built(cut, ahead)
    relay = Relay(
        CONFIG, num_slots=SLOTS, num_columns=COLUMNS, gamma=5, keeps_logits=False, device=CPU
    )
    relay.committed_len[torch.from_numpy(plan.request_slot)] = torch.from_numpy(plan.start_position)
    relay.write_pages(torch.from_numpy(plan.page_deltas))
    inputs = StepInputs.of(plan, CPU).with_drafts(torch.from_numpy(drafts), int(drafts.sum()))
    ours = DeviceBatchBuilder(CONFIG, LAYOUT, relay).build(inputs)
    assert_same_rows(ours.encoder, expected.encoder)
    assert_same_rows(ours.decoder, expected.decoder)
    for name in ("token_ids", "ring_index", "history_index", "ring_store", "logit_rows"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    for ratio, rows in expected.compress.items():
        assert_same_compress(ours.compress[ratio], rows)
