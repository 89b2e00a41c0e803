"""The DSpark draft model: against a dense reference, row by row, and on stale rings (dspark.md sections 1 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from draft_oracle import DraftOracle
from dsserve.config.model import ModelConfig, model_config_from_dict
from dsserve.kv.device import DevicePools
from dsserve.kv.layout import kv_layout
from dsserve.models.deepseek_v4.draft import DraftModel, Proposal
from dsserve.models.deepseek_v4.draft_context import history_rows
from dsserve.models.deepseek_v4.params import Params
from dsserve.models.deepseek_v4.random_weights import draw_weights
from dsserve.models.deepseek_v4.rope import RopeTables
from dsserve.models.deepseek_v4.tensors import expected_tensors
from dsserve.models.presets import preset_config
from dsserve_kernels.numerics import BY_NAME
from dsserve_kernels.select import select_operators

WINDOW, NUM_SLOTS, LENGTH = 128, 8, 512
CPU = torch.device("cpu")


@dataclass
class Head:
    """A draft model with random weights, and rings for it; the target is not there."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    model: DraftModel

    def pools(self, *, stale: bool = False) -> DevicePools:
        layout = kv_layout(self.config, 16, draft=True)
        pools = DevicePools(self.config, layout, num_pages=1, num_slots=NUM_SLOTS, device=CPU)
        if stale:
            for ring in pools.draft_window.values():
                ring.fill_(0xFF)
        return pools

    def propose(self, pools: DevicePools, cases: list[Case], *, gamma: int = 5) -> Proposal:
        """Drafts of some requests in one call, behind their histories."""
        newest = torch.tensor([case.position - 1 for case in cases])
        index = history_rows(
            torch.tensor([case.slot for case in cases]),
            newest,
            torch.tensor([case.floor for case in cases]),
            window=WINDOW,
            ring_rows=pools.layout.window_ring_rows,
        )
        anchors = torch.tensor([case.anchor for case in cases])
        return self.model.propose(anchors, newest + 1, index, gamma=gamma, pools=pools)


@dataclass
class Case:
    """A request: its slot, the newest token and its position, and what of its history exists."""

    slot: int
    anchor: int
    position: int
    floor: int
    taps: Tensor  # [positions floor .. position - 1, taps * D]

    @property
    def positions(self) -> list[int]:
        return list(range(self.floor, self.position))


@cache
def head(numerics: str) -> Head:
    body = preset_config(
        "tiny", image_token_id=2047, noise_token_id=2031, compressed_vocab_size=1600
    )
    config = model_config_from_dict(body)
    specs = {
        name: spec
        for name, spec in expected_tensors(config, draft=True).items()
        if name.startswith(("mtp.", "embed.", "head.")) and spec.skip_reason is None
    }
    tensors = dict(draw_weights(specs, config, seed=5))
    policy = BY_NAME[numerics]
    params = Params(tensors, select_operators("cpu", numerics), policy, config.rms_norm_eps, CPU)
    model = DraftModel(
        config,
        params,
        RopeTables(config, LENGTH, CPU),
        embed=params.raw("embed.weight").to(policy.act_dtype),
        head=params.fp32_linear("head"),
    )
    return Head(config, tensors, model)


def case(slot: int, position: int, history: int, *, numerics: str = "fp32") -> Case:
    """A request with random taps, `history` of them."""
    parts = head(numerics)
    generator = torch.Generator().manual_seed(1000 * slot + position)
    width = len(parts.config.dspark_target_layer_ids) * parts.config.hidden_size
    taps = torch.randn(history, width, generator=generator).to(BY_NAME[numerics].act_dtype)
    return Case(slot, 7 + 13 * slot, position, position - history, taps)


def write(parts: Head, pools: DevicePools, one: Case) -> None:
    positions = torch.tensor(one.positions, dtype=torch.int64)
    ring = pools.layout.window_ring_rows
    store = one.slot * ring + positions % ring
    parts.model.write_context(one.taps, positions, store, pools)


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("history", [0, 1, WINDOW - 1, WINDOW])
def test_drafts_are_those_of_the_dense_reference(history: int, gamma: int) -> None:
    parts, pools = head("fp32"), head("fp32").pools(stale=True)
    one = case(3, 200, history)
    write(parts, pools, one)
    proposal = parts.propose(pools, [one], gamma=gamma)
    oracle = DraftOracle(parts.config, parts.tensors)
    base, hidden = oracle.block(one.anchor, one.position, one.taps, one.positions, gamma)
    previous, logits, confidence = one.anchor, [], []
    for k in range(gamma):
        logits.append(oracle.markov(base[k], previous))
        confidence.append(oracle.confidence(hidden[k], previous))
        previous = int(logits[-1].argmax())
        assert int(proposal.ids[0, k]) == previous
    assert (proposal.logits[0] - torch.stack(logits)).abs().max() < 5e-5
    assert (proposal.confidence_raw[0] - torch.tensor(confidence)).abs().max() < 5e-6


def test_the_oldest_row_of_the_window_is_seen_and_the_one_before_is_not() -> None:
    """128 rows of history, not 127 and not 129: a changed row shows, a changed row behind the window does not."""
    parts = head("fp32")
    one = case(2, 200, WINDOW + 1)
    results = []
    for changed in (None, 0, 1):
        pools = parts.pools()
        write(parts, pools, one)
        if changed is not None:
            position = one.positions[changed]
            ring = pools.layout.window_ring_rows
            for rows in pools.draft_window.values():
                rows[one.slot * ring + position % ring] = 0
        results.append(parts.propose(pools, [one]).logits)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_every_row_of_a_block_sees_the_later_ones() -> None:
    """A shorter block is no prefix of a longer one."""
    parts, pools = head("fp32"), head("fp32").pools()
    one = case(1, 100, 100)
    write(parts, pools, one)
    short, long = (parts.propose(pools, [one], gamma=gamma) for gamma in (3, 5))
    assert (short.logits[:, :3] - long.logits[:, :3]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("numerics", ["released", "fp32"])
def test_drafts_of_a_request_depend_on_no_other(numerics: str) -> None:
    parts = head(numerics)
    lengths = ((1, 0), (1, 1), (37, 37), (128, 128), (300, 128), (300, 20))
    cases = [
        case(slot, position, history, numerics=numerics)
        for slot, (position, history) in enumerate(lengths, start=1)
    ]
    pools = parts.pools(stale=True)
    for one in cases:
        write(parts, pools, one)
    together = parts.propose(pools, cases)
    assert bool(together.logits.isfinite().all())
    backwards = parts.propose(pools, cases[::-1])
    for row, one in enumerate(cases):
        alone_pools = parts.pools()
        write(parts, alone_pools, one)
        alone = parts.propose(alone_pools, [one])
        for name in ("ids", "logits", "confidence_raw"):
            expected = getattr(alone, name)[0]
            assert torch.equal(getattr(together, name)[row], expected), (row, name)
            assert torch.equal(getattr(backwards, name)[-1 - row], expected), (row, name)


def test_a_block_writes_nothing() -> None:
    parts, pools = head("released"), head("released").pools(stale=True)
    one = case(4, 90, 90, numerics="released")
    write(parts, pools, one)
    before = {stage: ring.clone() for stage, ring in pools.draft_window.items()}
    parts.propose(pools, [one])
    assert all(torch.equal(ring, before[stage]) for stage, ring in pools.draft_window.items())


def test_context_rows_do_not_depend_on_the_rows_beside_them() -> None:
    parts = head("released")
    one = case(1, 60, 60, numerics="released")
    whole, single = parts.pools(), parts.pools()
    write(parts, whole, one)
    for row in range(60):
        piece = Case(1, 0, one.floor + row + 1, one.floor + row, one.taps[row : row + 1])
        write(parts, single, piece)
    for stage, ring in whole.draft_window.items():
        assert torch.equal(ring, single.draft_window[stage]), stage


def test_rows_stored_nowhere_change_nothing() -> None:
    parts, pools = head("released"), head("released").pools(stale=True)
    one = case(1, 3, 3, numerics="released")
    parts.model.write_context(one.taps, torch.arange(3), torch.full((3,), -1), pools)
    assert all(bool((ring == 0xFF).all()) for ring in pools.draft_window.values())


def test_chosen_drafts_condition_the_later_ones() -> None:
    """`choose` sees the logits of each draft; what it picks, not the arg-max, is what the next draft follows."""
    parts, pools = head("fp32"), head("fp32").pools()
    one = case(1, 20, 20)
    write(parts, pools, one)
    greedy = parts.propose(pools, [one])
    seen = []

    def choose(k: int, logits: Tensor) -> Tensor:
        seen.append((k, logits))
        return logits.topk(2, dim=1).indices[:, 1] if k == 0 else logits.argmax(1)

    index = history_rows(
        torch.tensor([1]),
        torch.tensor([19]),
        torch.tensor([0]),
        window=WINDOW,
        ring_rows=pools.layout.window_ring_rows,
    )
    other = parts.model.propose(
        torch.tensor([one.anchor]), torch.tensor([20]), index, gamma=5, pools=pools, choose=choose
    )
    assert [k for k, _ in seen] == [0, 1, 2, 3, 4]
    assert torch.equal(torch.stack([row for _, row in seen], dim=1), other.logits)
    assert torch.equal(other.logits[:, 0], greedy.logits[:, 0])
    assert other.ids[0, 0] != greedy.ids[0, 0]
    block = parts.model.block(
        torch.tensor([one.anchor]), torch.tensor([20]), index, gamma=5, pools=pools
    )
    assert torch.equal(other.logits[:, 1], parts.model.markov_logits(block, 1, other.ids[:, 0]))
    assert other.confidence_raw[0, 0] == greedy.confidence_raw[0, 0]
    assert other.confidence_raw[0, 1] != greedy.confidence_raw[0, 1]


def test_history_ends_at_the_floor_and_at_the_start() -> None:
    index = history_rows(
        torch.tensor([0, 1, 2]),
        torch.tensor([2, 5, 6]),
        torch.tensor([0, 4, 7]),
        window=4,
        ring_rows=6,
    )
    assert index.tolist() == [[-1, 0, 1, 2], [-1, -1, 10, 11], [-1, -1, -1, -1]]


def test_rings_of_the_draft_count_as_bytes_of_a_slot() -> None:
    config = head("fp32").config
    without, with_draft = kv_layout(config, 16), kv_layout(config, 16, draft=True)
    ring_bytes = with_draft.window_ring_rows * with_draft.window_row_bytes
    assert with_draft.bytes_per_slot - without.bytes_per_slot == 2 * ring_bytes
    pools = DevicePools(config, without, num_pages=1, num_slots=2, device=CPU)
    assert pools.draft_window == {}
    assert len(pools.window) == config.num_hidden_layers
