"""Numpy bodies of the CPU give the bits of the reference, also at the edges of their number formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsserve_kernels import arrays
from dsserve_kernels.arrays import MAX_ELEMENTS
from dsserve_kernels.quant.numpy_fp8 import e4m3_codes, round_e4m3, round_fp8_array, scaled
from dsserve_kernels.reference.quant import quantize_fp8, round_fp8_wide
from dsserve_kernels.registry import REGISTRY
from kernel_cases import CASES, run
from kernel_sources import Source

NUMPY_BODIES = sorted(
    name
    for name, bodies in REGISTRY.by_operator.items()
    if any(body.name == "numpy" for body in bodies)
)


@pytest.mark.parametrize("operator", NUMPY_BODIES)
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_numpy_bodies_give_the_bits_of_the_reference(operator: str, rows: int) -> None:
    for seed in range(20):
        arguments = CASES[operator].make(Source(seed), rows, torch.bfloat16)
        ours, theirs = (run(operator, body, arguments) for body in ("numpy", "reference"))
        for left, right in zip(ours, theirs, strict=True):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)


@pytest.mark.parametrize("operator", NUMPY_BODIES)
def test_rows_taken_some_at_a_time_have_the_bits_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, operator: str
) -> None:
    monkeypatch.setattr(arrays, "MAX_ELEMENTS", 512)
    for seed in range(5):
        arguments = CASES[operator].make(Source(seed), 33, torch.bfloat16)
        ours, theirs = (run(operator, body, arguments) for body in ("numpy", "reference"))
        for left, right in zip(ours, theirs, strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("k", [1, 5, 39])
def test_selection_takes_lower_positions_among_equals_and_nothing_hidden(k: int) -> None:
    source = Source(3)
    scores = source.normal(60, 40).round()
    scores = scores.masked_fill(torch.arange(40) >= source.ints(0, 41, 60, 1), -torch.inf)
    bodies = {body.name: body.body for body in REGISTRY.by_operator["topk_rows"]}
    assert torch.equal(bodies["numpy"](scores, k), bodies["reference"](scores, k))


def every_e4m3_tie_and_neighbour() -> np.ndarray:
    """All E4M3 numbers, the middles between them, and the floats next to those, both signs; 448 first in each block."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate(
        (numbers, middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(1000)))
    )
    values = np.concatenate((values, -values))
    values = np.pad(values, (0, -len(values) % 31)).reshape(-1, 31)
    return np.concatenate((np.full((len(values), 1), 448.0), values), 1).astype(np.float32)


@pytest.mark.parametrize("factor", [2.0**-9, 1.0, 2.0**20])
def test_fp8_rounding_is_that_of_the_reference_at_every_tie(factor: float) -> None:
    values = every_e4m3_tie_and_neighbour() * np.float32(factor)
    expected = round_fp8_wide(torch.from_numpy(values), torch.float64).numpy()
    assert np.array_equal(round_fp8_array(values), expected)
    quotients, scale = scaled(values)
    codes = e4m3_codes(round_e4m3(quotients), quotients).reshape(values.shape)
    their_codes, their_scales = quantize_fp8(torch.from_numpy(values))
    assert np.array_equal(codes, their_codes.view(torch.uint8).numpy())
    assert np.array_equal((scale.view(np.int32) >> 23)[:, 0], their_scales[:, 0].numpy())


def test_a_call_beyond_the_limit_has_the_rows_of_two_calls_below_it() -> None:
    rows = MAX_ELEMENTS // 64 + 2
    for operator in ("linear_fp8", "rms_norm"):
        (x,) = CASES[operator].make(Source(1), rows, torch.bfloat16)
        whole = run(operator, "numpy", (x,))[0]
        halves = [run(operator, "numpy", (part,))[0] for part in x.split(rows // 2 + 1)]
        assert torch.equal(whole, torch.cat(halves))
