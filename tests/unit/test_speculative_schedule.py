"""How many drafts a step verifies: the order, the synchronous rule, the budget of past drafts, and losslessness."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsserve.speculative.cost import AdditiveCost, CostModel
from dsserve.speculative.schedule import (
    VerifyBudget,
    allocate,
    allocate_synchronously,
    best_budget,
    ranked,
    survivals,
)
from dsserve_kernels.reference.speculative import allocate_drafts

if TYPE_CHECKING:
    from collections.abc import Callable

Float = NDArray[np.float64]
Int = NDArray[np.int64]
FLAT = CostModel()


class Rates:
    """Steps per second by token count, as in the paper's example; never probes."""

    def __init__(self, *rates: float) -> None:
        self.rates = rates

    def step_seconds(self, num_requests: int, num_tokens: Int) -> Float:
        assert num_requests
        return np.array([1 / self.rates[min(int(n), len(self.rates)) - 1] for n in num_tokens])

    def probe(self, num_requests: int, num_drafts: int) -> int | None:
        return None


# --- The counterexample: two symbols, target (0.7, 0.3), draft (0.5, 0.5), rates 1, 0.5, 0.45 ---------------------

TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)
RATES = Rates(1.0, 0.5, 0.45)
#: Confidence of the second draft, by the value of the first: sure behind a 0, hopeless behind a 1.
SECOND = (1.0, 0.0)
FIRST = sum(min(p, q) for p, q in zip(TARGET, DRAFT, strict=True))


def first_token(choose: Callable[[Float], int]) -> Float:
    """Distribution of the first output token, given how many drafts are verified for some survivals [1, 2]."""
    result = np.zeros(2)
    for draft, chance in enumerate(DRAFT):
        num_verified = choose(survivals(np.array([[FIRST, SECOND[draft]]])))
        if num_verified == 0:
            result += chance * np.array(TARGET)
            continue
        accepted = min(1.0, TARGET[draft] / DRAFT[draft])
        residual = np.maximum(np.subtract(TARGET, DRAFT), 0)
        result[draft] += chance * accepted
        result += chance * (1 - accepted) * residual / residual.sum()
    return result


def test_the_best_count_of_the_very_drafts_would_bias_the_output() -> None:
    """What the two rules below must not do: the draft's own value decides whether it is verified."""
    limits = np.array([2])
    biased = first_token(lambda survival: best_budget(survival, limits, RATES))
    assert biased == pytest.approx([0.85, 0.15])


def test_stopping_early_keeps_the_distribution_of_the_counterexample() -> None:
    limits = np.array([2])
    lossless = first_token(lambda survival: int(allocate_synchronously(survival, limits, RATES)[0]))
    assert lossless == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("past", [[FIRST, 1.0], [FIRST, 0.0], [1.0, 1.0], [0.1, 0.1]])
def test_a_budget_of_past_drafts_keeps_the_distribution_of_the_counterexample(
    past: list[float],
) -> None:
    """Whatever the drafts before were worth: the number is the same for every value of the current ones."""
    slots, owners = np.array([1]), np.array([7], dtype=np.uint64)

    def choose(current: Float) -> int:
        budget = VerifyBudget(RATES, gamma=2, num_slots=2)
        budget.observe(1, slots, owners, np.array([past]))
        budget.budget(2, slots, owners)
        confidences = np.array([[current[0, 0], current[0, 1] / current[0, 0]]])
        budget.observe(2, slots, owners, confidences)
        return int(allocate(current, np.array([2]), budget.budget(3, slots, owners))[0])

    assert first_token(choose) == pytest.approx([0.7, 0.3])


# --- Order and allocation ------------------------------------------------------------------------------------------

confidence_rows = st.integers(1, 6).flatmap(
    lambda gamma: st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), min_size=gamma, max_size=gamma),
        min_size=1,
        max_size=6,
    )
)


def drawn_limits(data: st.DataObject, survival: Float) -> Int:
    count, gamma = survival.shape
    limits = data.draw(st.lists(st.integers(0, gamma), min_size=count, max_size=count))
    return np.array(limits, dtype=np.int64)


def naive_lengths(survival: Float, limits: Int, budget: int) -> list[int]:
    """Admits one draft at a time: the likeliest successor of what each request has already."""
    lengths = [0] * len(survival)
    for _ in range(budget):
        open_ones = [r for r in range(len(survival)) if lengths[r] < limits[r]]
        if not open_ones:
            break
        best = max(open_ones, key=lambda r: (survival[r, lengths[r]], -lengths[r], -r))
        lengths[best] += 1
    return lengths


@settings(max_examples=40, deadline=None)
@given(confidence_rows, st.data())
def test_the_likeliest_drafts_are_verified(rows: list[list[float]], data: st.DataObject) -> None:
    survival = survivals(np.array(rows))
    limits = drawn_limits(data, survival)
    budget = data.draw(st.integers(0, survival.size + 1))
    lengths = allocate(survival, limits, budget)
    assert lengths.sum() == min(budget, limits.sum())
    assert (lengths <= limits).all()
    assert lengths.tolist() == naive_lengths(survival, limits, budget)


@settings(max_examples=40, deadline=None)
@given(confidence_rows, st.data())
def test_the_device_shares_out_a_budget_as_the_host_does(
    rows: list[list[float]], data: st.DataObject
) -> None:
    survival = survivals(np.array(rows))
    limits = drawn_limits(data, survival)
    budget = data.draw(st.integers(0, int(limits.sum())))
    on_device = allocate_drafts(
        torch.from_numpy(survival.astype(np.float32)), torch.from_numpy(limits), budget
    )
    assert on_device.tolist() == allocate(survival, limits, budget).tolist()


def test_broken_confidences_cost_only_their_own_request() -> None:
    confidences = np.array([[np.nan, 0.9], [0.9, 0.9], [0.8, np.nan]])
    survival, limits = survivals(confidences), np.full(3, 2)
    cost = CostModel(AdditiveCost(1.0, (), ((0, 0.0), (100, 20.0))))
    assert best_budget(survival, limits, cost) == 3
    assert allocate(survival, limits, 3).tolist() == [0, 2, 1]


def test_ties_go_to_the_earlier_position_then_to_the_earlier_request() -> None:
    requests, positions = ranked(np.ones((3, 2)), np.array([2, 1, 2]))
    pairs = list(zip(requests.tolist(), positions.tolist(), strict=True))
    assert pairs == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)]


@settings(max_examples=40, deadline=None)
@given(confidence_rows, st.data())
def test_a_drafts_own_confidence_does_not_decide_whether_it_is_verified_later(
    rows: list[list[float]], data: st.DataObject
) -> None:
    """With a fixed budget, confidences behind a draft change nothing about it or the drafts before it."""
    confidences = np.array(rows)
    count, gamma = confidences.shape
    request, position = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, gamma - 1))
    budget = data.draw(st.integers(0, confidences.size))
    limits = np.full(count, gamma)
    changed = confidences.copy()
    changed[request, position + 1 :] = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    verified = [
        int(allocate(survivals(c), limits, budget)[request]) > position
        for c in (confidences, changed)
    ]
    assert verified[0] == verified[1]


@settings(max_examples=40, deadline=None)
@given(confidence_rows, st.lists(st.floats(0.1, 2.0), min_size=40, max_size=40), st.data())
def test_the_budget_has_the_most_tokens_per_second(
    rows: list[list[float]], seconds: list[float], data: st.DataObject
) -> None:
    survival = survivals(np.array(rows))
    limits = drawn_limits(data, survival)
    cost = Rates(*(1 / s for s in seconds))
    count = len(survival)

    def throughput(budget: int) -> float:
        lengths = allocate(survival, limits, budget)
        gained = sum(survival[r, :n].sum() for r, n in enumerate(lengths))
        num_tokens = np.array([count + lengths.sum()])
        return float((count + gained) / cost.step_seconds(count, num_tokens)[0])

    best = best_budget(survival, limits, cost)
    values = [throughput(n) for n in range(int(limits.sum()) + 1)]
    assert values[best] == pytest.approx(max(values))
    lengths = allocate_synchronously(survival, limits, cost)
    stopped = int(lengths.sum())
    assert all(a < b for a, b in itertools.pairwise(values[: stopped + 1]))
    assert stopped == limits.sum() or values[stopped + 1] <= values[stopped] * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(confidence_rows, st.data())
def test_a_flat_cost_verifies_everything(rows: list[list[float]], data: st.DataObject) -> None:
    survival = survivals(np.array(rows))
    limits = drawn_limits(data, survival)
    assert best_budget(survival, limits, FLAT) == limits.sum()


# --- The budget of past drafts -------------------------------------------------------------------------------------

GAMMA = 3
SLOPE = AdditiveCost(1.0, (), ((0, 0.0), (100, 50.0)))


def fresh(num_slots: int = 4) -> VerifyBudget:
    return VerifyBudget(CostModel(SLOPE), gamma=GAMMA, num_slots=num_slots)


def owners_of(*owners: int) -> NDArray[np.uint64]:
    return np.array(owners, dtype=np.uint64)


def run(confidences: list[Float], *, overlap: bool) -> list[int]:
    """Budgets of a request whose steps propose these confidences, the first one a prefill."""
    budget, slots, owner = fresh(), np.array([2]), owners_of(9)
    budgets, observed = [], 0
    for step in range(1, len(confidences)):
        known = max(step - 1, 0) if overlap else step
        while observed < known:
            budget.observe(observed, slots, owner, confidences[observed][None])
            observed += 1
        budgets.append(budget.budget(step, slots, owner))
    return budgets


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.05, 0.5, 0.99]), min_size=3, max_size=3), min_size=3, max_size=7), st.data())  # fmt: skip
def test_changing_the_current_drafts_never_changes_the_budget(
    rows: list[list[float]], data: st.DataObject
) -> None:
    confidences = [np.array(row) for row in rows]
    budgets = run(confidences, overlap=False)
    step = data.draw(st.integers(1, len(rows) - 1))
    changed = list(confidences)
    changed[step - 1] = np.array(data.draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)))
    # Step `step` verifies what step - 1 proposed; later budgets may follow it.
    assert run(changed, overlap=False)[:step] == budgets[:step]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.05, 0.5, 0.99]), min_size=3, max_size=3), min_size=2, max_size=7))  # fmt: skip
def test_the_budget_is_the_same_with_and_without_overlap(rows: list[list[float]]) -> None:
    confidences = [np.array(row) for row in rows]
    assert run(confidences, overlap=True) == run(confidences, overlap=False)


def test_the_budget_follows_the_drafts_two_rounds_old() -> None:
    poor, rich = np.full(GAMMA, 0.01), np.full(GAMMA, 0.999)
    assert run([poor, rich, rich, rich, poor, poor, poor], overlap=True) == [3, 0, 3, 3, 3, 0]


def test_a_request_that_skips_steps_does_not_see_its_current_drafts() -> None:
    """Other requests' steps lie between: two steps old is not enough, two rounds of the request are."""
    budget, slots, owner = fresh(), np.array([1]), owners_of(5)
    poor = np.full((1, GAMMA), 0.01)
    budget.budget(1, slots, owner)
    budget.observe(1, slots, owner, poor)
    assert budget.budget(9, slots, owner) == GAMMA
    assert budget.budget(10, slots, owner) == 0


def test_a_new_request_in_an_old_slot_counts_as_certain() -> None:
    budget, slots = fresh(), np.array([1])
    poor = np.full((1, GAMMA), 0.01)
    for step in (1, 2):
        budget.budget(step, slots, owners_of(5))
        budget.observe(step, slots, owners_of(5), poor)
    assert budget.budget(3, slots, owners_of(5)) == 0
    for step in (4, 5):
        assert budget.budget(step, slots, owners_of(6)) == GAMMA


def test_requests_share_the_budget_and_keep_their_limits() -> None:
    budget, slots, owners = fresh(), np.array([1, 3]), owners_of(1, 2)
    rows = np.array([[0.999] * GAMMA, [0.01] * GAMMA])
    for step in (1, 2):
        budget.budget(step, slots, owners)
        budget.observe(step, slots, owners, rows)
    assert budget.budget(3, slots, owners) == GAMMA
    assert budget.budget(4, slots, owners, np.array([1, 3])) == 1
    assert budget.budget(5, slots[::-1].copy(), owners[::-1].copy()) == GAMMA


def test_probes_come_before_the_best_number() -> None:
    class Probing(Rates):
        def probe(self, num_requests: int, num_drafts: int) -> int | None:
            return num_requests + num_drafts

    budget = VerifyBudget(Probing(1.0), gamma=GAMMA, num_slots=2)
    assert budget.budget(1, np.array([1]), owners_of(1), np.array([2])) == 3
