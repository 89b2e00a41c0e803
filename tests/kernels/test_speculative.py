"""Acceptance of drafts and the share of each request, on a toy of eight symbols (dspark.md sections 3, 4 and 7)."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsserve_kernels.reference import sampling, speculative

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

SYMBOLS, GAMMA = 8, 3
DRAWS = 20_000
Tables = tuple[Tensor, Tensor]


def toy(seed: int) -> Tables:
    """A first-order target and draft: p, q [previous, next]; some q are 0 where p is not, and the reverse."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(SYMBOLS, SYMBOLS, generator=generator, dtype=torch.float64) ** 3
    q = torch.rand(SYMBOLS, SYMBOLS, generator=generator, dtype=torch.float64) ** 3
    p[0, 3] = p[2, 5] = q[0, 1] = q[1, 1] = q[4, 4] = 0.0
    return p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)


def hostile(seed: int) -> Tables:
    """The draft prefers what the target likes least."""
    p, _ = toy(seed)
    q = 1.0 / (p + 0.02)
    return p, q / q.sum(1, keepdim=True)


def run_rounds(
    tables: Tables, accept: Callable[..., tuple[Tensor, Tensor]], *, one_hot: bool = False
) -> np.ndarray:
    """The first two output tokens of many requests that decode in rounds, as counts [SYMBOLS, SYMBOLS]."""
    p, q = tables
    seeds = torch.arange(DRAWS)
    anchors, position = torch.zeros(DRAWS, dtype=torch.int64), torch.zeros(DRAWS, dtype=torch.int64)
    output = torch.full((DRAWS, 2 + GAMMA), -1)
    count = torch.zeros(DRAWS, dtype=torch.int64)
    for _ in range(2):
        draft, drafts = _propose(q, anchors, seeds, position, one_hot=one_hot)
        target = p[torch.cat((anchors.unsqueeze(1), drafts), dim=1)]
        whole = torch.full((DRAWS,), GAMMA)
        accepted, bonus = accept(drafts, target, draft, whole, seeds, position)
        run = torch.cat((drafts, torch.zeros(DRAWS, 1, dtype=torch.int64)), dim=1)
        run.scatter_(1, accepted.unsqueeze(1), bonus.unsqueeze(1))
        for place in range(GAMMA + 1):
            is_new = (place <= accepted) & (count + place < 2)
            where = (count + place).clamp(max=1)
            kept = output.gather(1, where.unsqueeze(1)).squeeze(1)
            output.scatter_(
                1, where.unsqueeze(1), torch.where(is_new, run[:, place], kept).unsqueeze(1)
            )
        # Those that are done go on at the side; their next anchor no longer matters.
        count = count + accepted + 1
        position = position + accepted + 1
        anchors = bonus
    pairs = output[:, 0] * SYMBOLS + output[:, 1]
    return torch.bincount(pairs, minlength=SYMBOLS**2).view(SYMBOLS, SYMBOLS).numpy()


def _propose(
    q: Tensor, anchors: Tensor, seeds: Tensor, position: Tensor, *, one_hot: bool
) -> tuple[Tensor, Tensor]:
    chain, rows = [anchors], []
    hot = torch.ones(len(anchors)) * (0.0 if one_hot else 1.0)
    for place in range(GAMMA):
        logits = q[chain[-1]].log().float()
        chain.append(speculative.draw_drafts(logits, hot, seeds, position, place))
        rows.append(logits)
    draft = speculative.draft_distribution(torch.stack(rows, dim=1), hot)
    return draft, torch.stack(chain[1:], dim=1)


def assert_fits(observed: np.ndarray, p: Tensor) -> None:
    """Chi-square of the pairs: mean n, variance 2n, five standard deviations."""
    expected = (p[0].unsqueeze(1) * p).numpy() * DRAWS
    is_possible = expected > 0
    assert observed.sum() == DRAWS
    assert observed[~is_possible].sum() == 0
    freedom = int(is_possible.sum()) - 1
    statistic = float(((observed - expected)[is_possible] ** 2 / expected[is_possible]).sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


ACCEPT = {"each": speculative.accept_sampled, "block": speculative.accept_block}


@pytest.mark.parametrize("one_hot", [False, True], ids=["sampled", "one-hot"])
@pytest.mark.parametrize("tables", [toy, hostile])
@pytest.mark.parametrize("accept", ACCEPT)
def test_two_tokens_follow_the_target_whatever_the_draft(
    accept: str, tables: Callable[[int], Tables], one_hot: bool
) -> None:
    p, q = tables(1)
    assert_fits(run_rounds((p, q), ACCEPT[accept], one_hot=one_hot), p)


def test_the_statistic_notices_a_draft_that_is_taken_for_the_target() -> None:
    """The test of the test: without the residual the pairs do not fit."""

    def wrong(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        drafts, target, _, whole, seeds, position = arguments
        return speculative.accept_sampled(drafts, target, target[:, :-1], whole, seeds, position)

    p, q = hostile(1)
    with pytest.raises(AssertionError):
        assert_fits(run_rounds((p, q), wrong), p)


def _one_round(accept: str, p: Tensor, q: Tensor) -> Tensor:
    seeds = torch.arange(8_000)
    zeros = torch.zeros_like(seeds)
    draft, drafts = _propose(q, zeros, seeds, zeros, one_hot=False)
    target = p[torch.cat((zeros.unsqueeze(1), drafts), dim=1)]
    accepted, _ = ACCEPT[accept](drafts, target, draft, zeros + GAMMA, seeds, zeros)
    return accepted.double().mean()


def test_block_verification_accepts_no_fewer_drafts() -> None:
    for seed in range(4):
        p, q = toy(seed)
        assert _one_round("block", p, q) > _one_round("each", p, q) - 0.02


@pytest.mark.parametrize("accept", ACCEPT)
def test_a_draft_like_the_target_is_always_accepted(accept: str) -> None:
    p, _ = toy(3)
    assert _one_round(accept, p, p) == GAMMA


@pytest.mark.parametrize("accept", ACCEPT)
def test_drafts_beyond_the_verified_ones_have_no_say(accept: str) -> None:
    """Behind the last verified draft the token comes from p: other drafts and other q there change nothing."""
    p, q = toy(5)
    seeds, zeros = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    draft, drafts = _propose(q, zeros, seeds, zeros, one_hot=False)
    target = p[torch.cat((zeros.unsqueeze(1), drafts), dim=1)]
    for num_drafts in range(GAMMA):
        other_draft, other_drafts = draft.clone(), drafts.clone()
        other_draft[:, num_drafts:] = 1 / SYMBOLS
        other_drafts[:, num_drafts:] = 7
        first = ACCEPT[accept](drafts, target, draft, zeros + num_drafts, seeds, zeros)
        second = ACCEPT[accept](other_drafts, target, other_draft, zeros + num_drafts, seeds, zeros)
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        assert int(first[0].max()) <= num_drafts


@pytest.mark.parametrize("accept", ACCEPT)
@pytest.mark.parametrize("poison", [math.nan, -0.5, 1.5])
def test_a_broken_draft_distribution_falls_back_to_the_target(accept: str, poison: float) -> None:
    p, _ = toy(6)
    count = 10_000
    seeds, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    drafts = torch.zeros(count, GAMMA, dtype=torch.int64)
    target = p[torch.cat((zeros.unsqueeze(1), drafts), dim=1)]
    draft = torch.full((count, GAMMA, SYMBOLS), poison, dtype=torch.float64)
    accepted, bonus = ACCEPT[accept](drafts, target, draft, zeros + GAMMA, seeds, zeros)
    assert int(accepted.max()) == 0
    observed = torch.bincount(bonus, minlength=SYMBOLS).double() / count
    assert float((observed - p[0]).abs().max()) < 0.03


def test_a_row_does_not_depend_on_its_batch() -> None:
    p, q = toy(7)
    seeds, zeros = torch.arange(64) * 7, torch.arange(64)
    draft, drafts = _propose(q, zeros % SYMBOLS, seeds, zeros, one_hot=False)
    target = p[torch.cat(((zeros % SYMBOLS).unsqueeze(1), drafts), dim=1)]
    arguments = (drafts, target, draft, torch.full((64,), GAMMA), seeds, zeros)
    for accept in ACCEPT.values():
        whole = accept(*arguments)
        chosen = random.Random(1).sample(range(64), 9)
        part = accept(*(argument[chosen] for argument in arguments))
        assert torch.equal(whole[0][chosen], part[0])
        assert torch.equal(whole[1][chosen], part[1])


def test_equal_draws_are_accepted_up_to_the_first_other_one() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 2, 3]])
    drawn = torch.tensor([[1, 2, 3, 4], [1, 5, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    num_drafts = torch.tensor([3, 3, 3, 2])
    assert speculative.accept_draws(drafts, drawn, num_drafts).tolist() == [3, 1, 0, 2]


def test_sampling_distribution_is_what_is_drawn() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, SYMBOLS, generator=generator)
    count = 20_000
    values = (torch.tensor([0.7]), torch.tensor([5]), torch.tensor([0.9]), torch.tensor([0.02]))
    p = sampling.sampling_distribution(logits, *values)[0]
    drawn = sampling.sample(
        logits.expand(count, -1),
        *(value.expand(count) for value in values),
        torch.arange(count),
        torch.zeros(count, dtype=torch.int64),
    )
    observed = torch.bincount(drawn, minlength=SYMBOLS).double() / count
    assert float(p.sum()) == pytest.approx(1.0)
    assert float((observed - p).abs().max()) < 0.015
    assert observed[p == 0].sum() == 0
    greedy = sampling.sampling_distribution(logits, torch.zeros(1), *values[1:])[0]
    assert greedy.tolist() == speculative.one_hot(logits[0].argmax(), SYMBOLS).tolist()


def naive_allocation(survival: list[list[float]], limits: list[int], budget: int) -> list[int]:
    ranked = sorted(
        (-survival[request][place], place, request)
        for request, limit in enumerate(limits)
        for place in range(limit)
    )
    counts = [0] * len(limits)
    for _, _, request in ranked[:budget]:
        counts[request] += 1
    return counts


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_likeliest_drafts_are_verified(data: st.DataObject) -> None:
    batch, gamma = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    steps = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    survival = [
        list(
            itertools.accumulate(
                data.draw(st.lists(steps, min_size=gamma, max_size=gamma)), lambda a, b: a * b
            )
        )
        for _ in range(batch)
    ]
    limits = data.draw(st.lists(st.integers(0, gamma), min_size=batch, max_size=batch))
    budget = data.draw(st.integers(0, sum(limits)))
    ours = speculative.allocate_drafts(torch.tensor(survival), torch.tensor(limits), budget)
    assert ours.tolist() == naive_allocation(survival, limits, budget)


def test_no_value_behind_a_place_decides_whether_it_is_verified() -> None:
    """Raising what comes behind a place cannot take the place's verification away (dspark.md section 4)."""
    generator = torch.Generator().manual_seed(3)
    limits = torch.tensor([3, 3, 2])
    for budget in range(9):
        survival = torch.rand(3, 3, generator=generator).cumprod(1)
        alone = survival.clone()
        alone[0, 1:] = 0.0
        before = speculative.allocate_drafts(alone, limits, budget)
        for wild in (0.5, 7.0, math.nan):
            other = survival.clone()
            other[0, 1:] = wild
            counts = speculative.allocate_drafts(other, limits, budget)
            assert int(counts.sum()) == budget
            assert bool(counts[0] >= 1) == bool(before[0] >= 1)
