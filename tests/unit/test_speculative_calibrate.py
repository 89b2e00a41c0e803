"""Temperatures of the draft model's confidences: fitted on some blocks, they make others better calibrated."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dsserve.errors import ConfigError
from dsserve.speculative.calibrate import (
    GRID,
    calibration_errors,
    expected_error,
    fit_temperatures,
    read_temperatures,
    write_temperatures,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Float = NDArray[np.float64]
    Mask = NDArray[np.bool_]

#: A head that is over-confident at first and too timid later.
TRUE = np.array([2.0, 1.5, 1.0, 0.6, 0.4])


def blocks(count: int, seed: int) -> tuple[Float, Mask]:
    """Raw confidences whose temperatures are `TRUE`, and drafts accepted with the chances these give."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(1.5, 2.0, (count, len(TRUE)))
    chance = 1 / (1 + np.exp(-raw / TRUE))
    return raw, np.cumprod(rng.random(raw.shape) < chance, axis=1).astype(np.bool_)


def test_the_grid_is_that_of_the_paper() -> None:
    assert len(GRID) == 41
    assert GRID[[0, 20, 40]] == pytest.approx([0.1, 1.0, 10.0])


def test_temperatures_lower_the_error_on_held_out_blocks() -> None:
    fitted = fit_temperatures(*blocks(20_000, seed=1))
    raw, accepted = blocks(20_000, seed=2)
    before = calibration_errors(raw, accepted, np.ones(5))
    after = calibration_errors(raw, accepted, np.array(fitted.temperatures))
    assert before[0] > 0.05
    assert max(after) < 0.02
    assert all(new < old for new, old in zip(after, before, strict=True))


def test_temperatures_are_found_again() -> None:
    fitted = fit_temperatures(*blocks(50_000, seed=3))
    assert np.array(fitted.temperatures[:3]) == pytest.approx(TRUE[:3], rel=0.25)
    assert fitted.num_blocks == 50_000
    assert all(new <= old for new, old in zip(fitted.error_after, fitted.error_before, strict=True))


def test_each_temperature_is_chosen_with_those_before_it_fixed() -> None:
    raw, accepted = blocks(5000, seed=4)
    whole = fit_temperatures(raw, accepted)
    for length in (1, 3):
        part = fit_temperatures(raw[:, :length], accepted[:, :length])
        assert part.temperatures == whole.temperatures[:length]
    survival = np.cumprod(1 / (1 + np.exp(-raw[:, :3] / np.array(whole.temperatures[:3]))), axis=1)
    least = min(
        expected_error(survival[:, 1] / (1 + np.exp(-raw[:, 2] / t)), accepted[:, 2]) for t in GRID
    )
    assert whole.error_after[2] == pytest.approx(least)


def test_the_error_weighs_bins_by_their_size() -> None:
    chances = np.array([0.01, 0.02, 0.99, 1.0])
    happened = np.array([False, True, True, True])
    # Bin 0: says 0.015, true 0.5, half of all; the last bin: says 0.995, true 1.
    assert expected_error(chances, happened) == pytest.approx(0.5 * 0.485 + 0.5 * 0.005)


def test_confidences_that_never_vary_keep_a_temperature_near_one() -> None:
    raw = np.zeros((10, 1))
    accepted = np.array([[True], [False]] * 5)
    assert fit_temperatures(raw, accepted).temperatures == (1.0,)


@pytest.mark.parametrize(
    ("raw", "accepted", "message"),
    [
        (np.zeros((0, 3)), np.zeros((0, 3), dtype=np.bool_), "needs blocks"),
        (np.zeros((2, 3)), np.zeros((2, 2), dtype=np.bool_), "needs blocks"),
        (np.zeros((1, 2)), np.array([[False, True]]), "behind a rejected one"),
    ],
)
def test_impossible_blocks_are_refused(raw: Float, accepted: Mask, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_temperatures(raw, accepted)


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    fitted = fit_temperatures(*blocks(500, seed=5))
    write_temperatures(tmp_path / "t.json", fitted)
    assert read_temperatures(tmp_path / "t.json", 5) == fitted.temperatures
    body = json.loads((tmp_path / "t.json").read_text())
    assert body["error_before"] == list(fitted.error_before)


def test_a_file_of_other_blocks_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_temperatures(tmp_path / "t.json", fit_temperatures(*blocks(500, seed=5)))
    with pytest.raises(ConfigError, match="--speculative-num-draft-tokens 4"):
        read_temperatures(tmp_path / "t.json", 3)


@pytest.mark.parametrize(
    "body", ["[]", "{", '{"temperatures": [1, -1]}', '{"temperatures": [true]}']
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, body: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(body)
    with pytest.raises(ConfigError, match=r"t\.json"):
        read_temperatures(path, 2)
    with pytest.raises(ConfigError, match="missing"):
        read_temperatures(tmp_path / "missing", 2)
    with pytest.raises(ConfigError, match="nowhere"):
        write_temperatures(tmp_path / "nowhere" / "t", fit_temperatures(*blocks(9, seed=1)))
