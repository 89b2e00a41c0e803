"""What a step costs: learnt from noisy measurements, flat before that, or read from a profiled table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsserve.errors import ConfigError
from dsserve.speculative.cost import CostModel, fit_additive, read_table
from dsserve.speculative.schedule import best_budget, survivals

if TYPE_CHECKING:
    from pathlib import Path

GAMMA = 5


def truth(num_requests: int, num_tokens: int) -> float:
    return 0.004 + 0.0003 * num_requests + 0.0008 * num_tokens


def trained(num_steps: int, *, most: int, outliers: float = 0.03, seed: int = 0) -> CostModel:
    """A model that measured steps of 1 to `most` requests, with noise of 5 % and long pauses now and then."""
    rng, model = np.random.default_rng(seed), CostModel()
    for _ in range(num_steps):
        count = int(rng.integers(1, most + 1))
        probe = model.probe(count, GAMMA * count)
        num_tokens = count + (GAMMA * count if probe is None else probe)
        pause = 8 if rng.random() < outliers else 1
        noise = 1 + 0.05 * rng.standard_normal()
        model.observe(count, num_tokens, truth(count, num_tokens) * noise * pause)
    return model


@pytest.mark.parametrize(("most", "num_steps"), [(1, 200), (8, 800)])
def test_noisy_steps_are_learnt(most: int, num_steps: int) -> None:
    model = trained(num_steps, most=most)
    for count in range(1, most + 1):
        tokens = np.arange(count, (GAMMA + 1) * count + 1)
        expected = np.array([truth(count, int(n)) for n in tokens])
        assert np.abs(model.step_seconds(count, tokens) / expected - 1).max() < 0.2, count


def test_the_learnt_budget_is_nearly_as_good_as_the_best() -> None:
    model, rng = trained(800, most=8, seed=1), np.random.default_rng(2)

    class Truth:
        def step_seconds(self, num_requests: int, num_tokens: np.ndarray[Any, Any]) -> Any:
            return np.array([truth(num_requests, int(n)) for n in num_tokens])

    for _ in range(20):
        survival = survivals(rng.uniform(0.3, 1.0, (8, GAMMA)))
        limits = np.full(8, GAMMA)
        ordered = np.sort(survival.ravel())[::-1]

        def throughput(budget: int, ordered: Any = ordered) -> float:
            return float((8 + ordered[:budget].sum()) / truth(8, 8 + budget))

        best = best_budget(survival, limits, Truth())
        assert throughput(best_budget(survival, limits, model)) > 0.97 * throughput(best)


def test_nothing_measured_is_flat() -> None:
    model = CostModel()
    assert model.curve is None
    assert model.step_seconds(3, np.arange(3, 20)).tolist() == [1.0] * 17
    for _ in range(100):
        model.observe(2, 12, 0.01)  # one count tells nothing about others
    assert model.curve is None


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_ignored(step_s: float) -> None:
    model = trained(300, most=2)
    before = model.step_seconds(2, np.arange(2, 13))
    for _ in range(300):
        model.observe(2, 7, step_s)
    assert (model.step_seconds(2, np.arange(2, 13)) == before).all()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 200), st.floats(1e-4, 1.0)),
        min_size=2,
        max_size=25,
    )
)
@example([(1, 25, 0.5), (1, 26, 1.0)])  # a steep line, which reaches 0 before the first token
def test_more_tokens_or_requests_never_cost_less(steps: list[tuple[int, int, float]]) -> None:
    cells = [(count, count + extra, seconds, 1.0) for count, extra, seconds in steps]
    curve = fit_additive(np.array(cells))
    tokens = np.arange(1, 400)
    times = np.array([curve.step_seconds(count, tokens) for count in (1, 2, 7, 40, 80)])
    assert (times > 0).all()
    assert (np.diff(times, axis=0) >= -1e-12).all()
    assert (np.diff(times, axis=1) >= -1e-12).all()


def test_a_changed_machine_is_learnt_again() -> None:
    model = trained(400, most=1)
    slow = np.random.default_rng(3)
    for _ in range(400):
        probe = model.probe(1, GAMMA)
        num_tokens = 1 + (GAMMA if probe is None else probe)
        model.observe(1, num_tokens, 3 * truth(1, num_tokens) * (1 + 0.05 * slow.standard_normal()))
    assert model.step_seconds(1, np.array([6]))[0] == pytest.approx(3 * truth(1, 6), rel=0.1)


def test_probes_try_every_share_at_first_and_are_rare_later() -> None:
    model = CostModel()
    first = [model.probe(2, 8) for _ in range(CostModel.FIRST_PROBES)]
    assert None not in first
    assert {n for n in first if n is not None} == {0, 2, 4, 6, 8}
    later = [model.probe(2, 8) for _ in range(960)]
    assert sum(n is not None for n in later) == 20
    assert model.probe(64, 320) is not None, "more requests than ever before"
    assert model.probe(2, 0) is None


def table(tmp_path: Path, body: object) -> Path:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    return path


def test_an_additive_table_is_interpolated_and_stays_fixed(tmp_path: Path) -> None:
    body = {"bias_s": 0.5, "requests": [[1, 0.0], [3, 0.2]], "tokens": [[0, 0.0], [10, 1.0], [20, 3.0]]}  # fmt: skip
    model = CostModel.from_table(table(tmp_path, body))
    expected = [0.5 + 0.1 + 0.5, 0.5 + 0.1 + 2.0, 0.5 + 0.1 + 5.0]
    assert model.step_seconds(2, np.array([5, 15, 30])) == pytest.approx(expected)
    for _ in range(200):
        model.observe(2, 5, 9.0)
        model.observe(2, 15, 9.0)
    assert model.step_seconds(2, np.array([5, 15, 30])) == pytest.approx(expected)
    assert model.probe(2, 10) is None


def test_a_table_of_rates_is_a_staircase(tmp_path: Path) -> None:
    """Probed sizes and steps per second; a size between two has the rate of the smaller one."""
    model = CostModel.from_table(table(tmp_path, {"steps": [[1, 1.0], [2, 0.5], [4, 0.25]]}))
    assert model.step_seconds(1, np.array([1, 2, 3, 4, 9])).tolist() == [1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "expected an object"),
        ({}, "neither steps nor tokens"),
        ({"steps": [[1, 0.0]]}, "must be positive"),
        ({"steps": [[2, 1.0], [1, 2.0]]}, "ascending"),
        ({"steps": [[1]]}, "pairs"),
        ({"tokens": "x"}, "pairs"),
        ({"tokens": [[1, -1.0]]}, "pairs"),
        ({"tokens": [[1, 1.0]], "bias_s": "x"}, "bias_s"),
        ({"tokens": [[1, 1.0]], "bias_s": -1}, "bias_s"),
    ],
)
def test_a_bad_table_is_refused_with_its_name(tmp_path: Path, body: object, message: str) -> None:
    path = table(tmp_path, body)
    with pytest.raises(ConfigError, match=message) as caught:
        read_table(path)
    assert str(path) in str(caught.value)


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        read_table(tmp_path / "none.json")
