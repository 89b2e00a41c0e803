"""Sequential temperature scaling of the draft model's confidences (dspark.md section 4, paper 3.2.1). Numpy only.

The survival of draft k is the product of sigmoid(raw_i / T_i) over i <= k. From left to right each T_k is chosen so
that the survivals of draft k are as often right as they say, the temperatures before it fixed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float = NDArray[np.float64]

#: Candidates for a temperature, and bins of the calibration error.
GRID = np.logspace(-1, 1, 41)
NUM_BINS = 15


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted temperatures, and how far off the survivals were before and are now.

    Attributes:
        temperatures: T_k of each draft of a block.
        error_before: Expected calibration error of each draft's survival with all temperatures 1.
        error_after: The same with `temperatures`.
        num_blocks: Blocks they were fitted on.
    """

    temperatures: tuple[float, ...]
    error_before: tuple[float, ...]
    error_after: tuple[float, ...]
    num_blocks: int


def fit_temperatures(raw: NDArray[np.floating], accepted: NDArray[np.bool_]) -> Calibration:
    """Choose the temperature of each draft of a block.

    Args:
        raw: [n, gamma] raw confidences, before temperature and sigmoid.
        accepted: [n, gamma] whether the draft and all before it were accepted.

    Raises:
        ConfigError: There is no block, or the masks are no prefixes.
    """
    if not len(raw) or raw.shape != accepted.shape:
        raise ConfigError(
            f"calibration needs blocks: {raw.shape} confidences, {accepted.shape} masks"
        )
    if (accepted[:, 1:] & ~accepted[:, :-1]).any():
        raise ConfigError("a draft cannot be accepted behind a rejected one")
    before = calibration_errors(raw, accepted, np.ones(raw.shape[1]))
    survival = np.ones(len(raw))
    temperatures, after = [], []
    for k in range(raw.shape[1]):
        # One row for each candidate of the grid.
        candidates = survival * _sigmoid(raw[:, k] / GRID[:, None])
        errors = [expected_error(candidate, accepted[:, k]) for candidate in candidates]
        best = _flattest(errors)
        temperatures.append(float(GRID[best]))
        after.append(float(errors[best]))
        survival = candidates[best]
    return Calibration(tuple(temperatures), tuple(before), tuple(after), len(raw))


def calibration_errors(
    raw: NDArray[np.floating], accepted: NDArray[np.bool_], temperatures: Float
) -> list[float]:
    """Expected calibration error of the survival of each draft."""
    survival = np.cumprod(_sigmoid(raw / temperatures), axis=1, dtype=np.float64)
    return [expected_error(survival[:, k], accepted[:, k]) for k in range(raw.shape[1])]


def expected_error(chances: Float, happened: NDArray[np.bool_]) -> float:
    """Mean distance between what is said and what is true, over bins of equal width weighted by their size."""
    bins = np.minimum((chances * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    said = np.bincount(bins, chances, NUM_BINS)
    true = np.bincount(bins, happened, NUM_BINS)
    return float(np.abs(said - true).sum() / len(chances))


def _is_temperature(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < np.inf


def _flattest(errors: list[float]) -> int:
    """Index of the least error; of equal ones that nearest to a temperature of 1."""
    best = min(errors)
    middle = len(errors) // 2
    return min((i for i, e in enumerate(errors) if e == best), key=lambda i: abs(i - middle))


def _sigmoid(x: NDArray[np.floating]) -> Float:
    """Without overflow for any float."""
    result: Float = 0.5 * (1 + np.tanh(0.5 * x.astype(np.float64)))
    return result


def write_temperatures(path: str | Path, calibration: Calibration) -> None:
    """Write what `read_temperatures` reads.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"temperatures {path}: {error}") from None


def read_temperatures(path: str | Path, gamma: int) -> tuple[float, ...]:
    """The temperatures of a server whose blocks have `gamma` drafts.

    Raises:
        ConfigError: The file cannot be read, holds no positive numbers, or was fitted for other blocks: the rows of a
            block see each other, so a shorter block is not the start of a longer one.
    """
    try:
        body: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"temperatures {path}: {error}") from None
    values = body.get("temperatures") if isinstance(body, dict) else None
    if not isinstance(values, list) or not all(_is_temperature(value) for value in values):
        raise ConfigError(f'temperatures {path}: expected {{"temperatures": [positive numbers]}}')
    if len(values) != gamma:
        raise ConfigError(
            f"temperatures {path}: fitted for blocks of {len(values)} drafts, but this server drafts {gamma}; "
            f"fit them anew with --speculative-num-draft-tokens {gamma + 1}"
        )
    return tuple(float(value) for value in values)
