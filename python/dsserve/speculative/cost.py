"""What a step costs, learnt while serving: bias + alpha(requests) + theta(tokens) (dspark.md section 4).

Both functions are piecewise linear and never fall, so a short step that was measured slow by accident cannot make a
longer one look cheap. Times are medians of the latest measurements of a cell and errors are relative to the measured
time, so a pause weighs little.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float = NDArray[np.float64]
    Int = NDArray[np.int64]

#: Knots of both functions: exact below 8, then about 1.4 apart.
KNOTS = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    11,
    16,
    23,
    32,
    45,
    64,
    91,
    128,
    181,
    256,
    362,
    512,
    724,
    1024,
    2048,
    4096,
    8192,
)
#: Measurements a cell keeps; cells that are kept (the longest unused goes first).
_SAMPLES, _MAX_CELLS = 15, 256
#: Measurements between two fits: an eighth of those made, within these bounds.
_FIT_INTERVALS = (16, 256)
#: Sweeps of the coordinate descent; weights of the smoothness of slopes, and of the requests' share.
_SWEEPS, _SMOOTH, _SHRINK = 60, 1e-3, 1e-4
#: Any step costs at least this share of the quickest one seen: extrapolated to few tokens it would else be free.
_LEAST_BIAS = 0.01


@dataclass(frozen=True, slots=True)
class AdditiveCost:
    """Bias + alpha(requests) + theta(tokens), linear between points and beyond the last two.

    Attributes:
        bias_s: Seconds of any step.
        requests: Points (number of requests, seconds).
        tokens: Points (number of tokens, seconds).
        is_staircase: The functions keep the value of the point below instead.
    """

    bias_s: float
    requests: tuple[tuple[int, float], ...]
    tokens: tuple[tuple[int, float], ...]
    is_staircase: bool = False

    def step_seconds(self, num_requests: int, num_tokens: Int) -> Float:
        """Seconds of a step for each of several token counts."""
        alpha = self._at(self.requests, np.array([num_requests]))
        return self.bias_s + alpha + self._at(self.tokens, num_tokens)

    def _at(self, points: tuple[tuple[int, float], ...], where: Int) -> Float:
        if not points:
            return np.zeros(len(where))
        x, y = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        if self.is_staircase:
            stairs: Float = y[np.maximum(np.searchsorted(x, where, side="right") - 1, 0)]
            return stairs
        inside: Float = np.interp(where, x, y)
        if len(x) > 1:
            slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
            inside += slope * np.maximum(where - x[-1], 0)
        return inside


class CostModel:
    """Predicts step times; flat (every step costs the same) until it has seen enough to tell steps apart.

    A flat cost verifies every draft. So that shorter steps are seen at all, `probe` asks for one now and then.
    """

    #: Shares of the drafts that probes ask for, in turn.
    PROBE_SHARES = (0.0, 0.5, 1.0, 0.25, 0.75)
    #: Probes at first, for each order of magnitude (power of two) of the number of requests; then one in so many steps.
    FIRST_PROBES, PROBE_INTERVAL = 15, 48

    def __init__(self, table: AdditiveCost | None = None) -> None:
        """Learn from nothing, or keep to a profiled table."""
        self._curve, self._is_fixed = table, table is not None
        self._cells: OrderedDict[tuple[int, int], deque[float]] = OrderedDict()
        self._num_observed, self._next_fit = 0, _FIT_INTERVALS[0]
        self._num_steps = self._num_probes = 0
        self._first_probes: dict[int, int] = {}

    @classmethod
    def from_table(cls, path: str | Path) -> CostModel:
        """A model that keeps to a file; see `read_table`."""
        return cls(read_table(path))

    @property
    def curve(self) -> AdditiveCost | None:
        """The current prediction, or None while it is flat."""
        return self._curve

    def observe(self, num_requests: int, num_tokens: int, step_s: float) -> None:
        """Learn from one measured step of decode or verify rows.

        Args:
            num_requests: Requests of the step.
            num_tokens: Its rows, anchors included.
            step_s: Seconds it took; what is not positive and finite is ignored.
        """
        if self._is_fixed or not (np.isfinite(step_s) and step_s > 0):
            return
        cell = (num_requests, num_tokens)
        if cell not in self._cells:
            self._cells[cell] = deque(maxlen=_SAMPLES)
            if len(self._cells) > _MAX_CELLS:
                self._cells.popitem(last=False)
        self._cells[cell].append(step_s)
        self._cells.move_to_end(cell)
        self._num_observed += 1
        if self._num_observed >= self._next_fit:
            low, high = _FIT_INTERVALS
            self._next_fit += min(max(self._num_observed // 8, low), high)
            self._fit()

    def step_seconds(self, num_requests: int, num_tokens: Int) -> Float:
        """Seconds of a step for each of several token counts."""
        if self._curve is None:
            return np.ones(len(num_tokens))
        return self._curve.step_seconds(num_requests, num_tokens)

    def probe(self, num_requests: int, num_drafts: int) -> int | None:
        """Drafts to verify instead of the best number, to learn what that costs; call it once a verify step.

        Args:
            num_requests: Requests of the step.
            num_drafts: All drafts that the step could verify.

        Returns:
            None for most steps. Depends on the calls alone, never on drafts or confidences.
        """
        if self._is_fixed or num_drafts == 0:
            return None
        self._num_steps += 1
        size = num_requests.bit_length()
        done = self._first_probes.get(size, 0)
        if done >= self.FIRST_PROBES and self._num_steps % self.PROBE_INTERVAL:
            return None
        self._first_probes[size] = done + 1
        share = self.PROBE_SHARES[self._num_probes % len(self.PROBE_SHARES)]
        self._num_probes += 1
        return round(share * num_drafts)

    def _fit(self) -> None:
        cells = [
            (*cell, float(np.median(times)), len(times)) for cell, times in self._cells.items()
        ]
        if len({tokens for _, tokens, _, _ in cells}) < 2:
            return
        self._curve = fit_additive(np.array(cells, dtype=np.float64))


def fit_additive(cells: Float) -> AdditiveCost:
    """The non-decreasing piecewise linear functions nearest to measured cells, by relative error.

    Args:
        cells: [n, 4]: requests, tokens, seconds, weight; at least two token counts.
    """
    requests, tokens, seconds, weight = cells.T
    request_knots, token_knots = _used(requests), _used(tokens)
    unit = float(np.median(seconds))
    basis = np.concatenate(
        (np.ones((len(cells), 1)), _ramps(requests, request_knots), _ramps(tokens, token_knots)),
        axis=1,
    )
    # Each row is divided by its time: relative errors, whatever the size of the step.
    rows = basis * (unit / seconds * np.sqrt(weight / weight.sum()))[:, None]
    target = np.sqrt(weight / weight.sum())
    num_alpha = len(request_knots) - 1
    penalty = np.zeros((basis.shape[1], basis.shape[1]))
    penalty[1 : 1 + num_alpha, 1 : 1 + num_alpha] = _roughness(request_knots)
    penalty[1 + num_alpha :, 1 + num_alpha :] = _roughness(token_knots)
    # Where both explain a time as well, it is the tokens: that belief is soon put to the test, the other never.
    penalty[range(num_alpha + 1), range(num_alpha + 1)] += _SHRINK
    values = _non_negative(rows.T @ rows + penalty, rows.T @ target) * unit
    alpha = np.concatenate(([0.0], np.cumsum(values[1 : 1 + num_alpha])))
    theta = np.concatenate(([0.0], np.cumsum(values[1 + num_alpha :])))
    return AdditiveCost(
        float(max(values[0], _LEAST_BIAS * seconds.min())),
        tuple((int(x), float(y)) for x, y in zip(request_knots, alpha, strict=True)),
        tuple((int(x), float(y)) for x, y in zip(token_knots, theta, strict=True)),
    )


def _used(counts: Float) -> Float:
    """Knots around what was measured; what lies beyond is extrapolated."""
    knots = np.array(KNOTS, dtype=np.float64)
    first = max(int(np.searchsorted(knots, counts.min(), side="right")) - 1, 0)
    last = min(int(np.searchsorted(knots, counts.max(), side="left")), len(knots) - 1)
    return knots[first : max(last, first + 1) + 1]


def _ramps(counts: Float, knots: Float) -> Float:
    """[n, knots - 1]: how much of each interval lies below a count; the last one goes on."""
    ramps: Float = (counts[:, None] - knots[:-1]) / np.diff(knots)
    ramps[:, :-1] = ramps[:, :-1].clip(0, 1)
    return ramps.clip(0, None)


def _roughness(knots: Float) -> Float:
    """Quadratic form of the differences between the slopes of neighbouring intervals."""
    widths = np.diff(knots)
    differences = np.zeros((max(len(widths) - 1, 0), len(widths)))
    mean = widths.mean()
    for i in range(len(differences)):
        differences[i, i], differences[i, i + 1] = -mean / widths[i], mean / widths[i + 1]
    return _SMOOTH * differences.T @ differences


def _non_negative(matrix: Float, vector: Float) -> Float:
    """Minimise x A x / 2 - b x over x >= 0 by coordinate descent."""
    values = np.zeros(len(vector))
    diagonal = np.maximum(np.diag(matrix), 1e-12)
    for _ in range(_SWEEPS):
        for i in range(len(values)):
            step = (vector[i] - matrix[i] @ values) / diagonal[i]
            values[i] = max(values[i] + step, 0.0)
    return values


def read_table(path: str | Path) -> AdditiveCost:
    """Read a profiled table.

    Args:
        path: JSON: `{"steps": [[tokens, steps per second], ..]}`, a staircase, or
            `{"bias_s": .., "requests": [[n, s], ..], "tokens": [[n, s], ..]}`.

    Raises:
        ConfigError: The file cannot be read or is no such table.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cost table {path}: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"cost table {path}: expected an object")
    if "steps" in body:
        rates = _points(body["steps"], f"{path}: steps")
        if not all(rate > 0 for _, rate in rates):
            raise ConfigError(f"cost table {path}: steps per second must be positive")
        stairs = tuple((count, 1 / rate) for count, rate in rates)
        return AdditiveCost(0.0, (), stairs, is_staircase=True)
    bias = body.get("bias_s", 0.0)
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not bias >= 0:
        raise ConfigError(f"cost table {path}: bias_s must be a number of seconds, not {bias!r}")
    table = AdditiveCost(
        float(bias),
        _points(body.get("requests", []), f"{path}: requests"),
        _points(body.get("tokens", []), f"{path}: tokens"),
    )
    if not table.tokens:
        raise ConfigError(f"cost table {path}: neither steps nor tokens")
    return table


def _points(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    ok = isinstance(value, list) and all(
        isinstance(point, list)
        and len(point) == 2
        and not any(isinstance(item, bool) for item in point)
        and isinstance(point[0], int)
        and isinstance(point[1], int | float)
        and point[1] >= 0
        for point in value
    )
    if not ok:
        raise ConfigError(f"cost table {where} must be pairs [count, number]")
    points = tuple((point[0], float(point[1])) for point in value)
    if any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
        raise ConfigError(f"cost table {where} must have ascending counts")
    return points
