"""Quantisers against the definitions of model.md section 2, worked out number by number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsserve_kernels.reference.kvcache import (
    load_index_rows,
    load_main_rows,
    load_window_rows,
    store_index_rows,
    store_main_rows,
    store_window_rows,
)
from dsserve_kernels.reference.quant import (
    dequantize_fp4_index,
    dequantize_fp4_main,
    quantize_fp4_index,
    quantize_fp4_main,
    quantize_fp8,
    round_fp4_index,
    round_fp4_main,
    round_fp8,
    ue8m0_value,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
#: Values of the E4M3 codes 0..126, from exponent and mantissa.
E4M3 = [
    (code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
    for code in range(127)
]


def nearest(value: float, table: Sequence[float]) -> int:
    """Code of the nearest magnitude, ties to the even code, too large values to the last."""
    size = min(abs(value), table[-1])
    return min(range(len(table)), key=lambda code: (abs(table[code] - size), code % 2))


def pow2_above(value: np.float32) -> float:
    """The power of two at or above a positive float32."""
    mantissa, exponent = math.frexp(float(value))
    return 2.0 ** (exponent - 1) if mantissa == 0.5 else 2.0**exponent


def naive_fp8(block: np.ndarray) -> tuple[list[float], float]:
    largest = max(np.float32(np.abs(block).max()), np.float32(1e-4))
    scale = pow2_above(np.float32(largest * np.float32(1 / 448)))
    return [math.copysign(E4M3[nearest(v / scale, E4M3)], v) * scale for v in block.tolist()], scale


def naive_fp4_index(block: np.ndarray) -> tuple[list[float], float]:
    largest = max(np.float32(np.abs(block).max()), np.float32(6 * 2.0**-126))
    scale = pow2_above(np.float32(largest * np.float32(1 / 6)))
    return [math.copysign(E2M1[nearest(v / scale, E2M1)], v) * scale for v in block.tolist()], scale


def naive_fp4_main(block: np.ndarray) -> tuple[list[float], float]:
    largest = max(np.float32(np.abs(block).max()), np.float32(6 * 2.0**-9))
    sixth = float(np.float32(largest / np.float32(6)))
    scale = E4M3[max(nearest(sixth, E4M3), 1)]
    quotients = [float(v / np.float32(scale)) for v in block]
    return [math.copysign(E2M1[nearest(q, E2M1)], q) * scale for q in quotients], scale


#: Zeros, subnormals, tiny and large numbers, powers of two, midpoints between codes, ordinary numbers.
numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, 1e-40, 1e-4, -1e-4, 448.0, -448.0, 6.0, 2.0**-9, 2.0**15]),
    st.integers(-30, 15).map(lambda e: 2.0**e),
    st.tuples(st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), st.integers(-12, 8)).map(
        lambda pair: math.ldexp(*pair)
    ),
    st.tuples(st.integers(0, 125), st.integers(-14, 6)).map(
        lambda pair: math.ldexp((E4M3[pair[0]] + E4M3[pair[0] + 1]) / 2, pair[1])
    ),
    st.floats(-1000, 1000, width=32),
    st.floats(-(2.0**-10), 2.0**-10, width=32),
).flatmap(lambda value: st.sampled_from([value, -value]))


def blocks(size: int) -> st.SearchStrategy[list[float]]:
    """Mixed blocks, blocks of one number, and blocks with one number that is not zero."""
    return st.one_of(
        st.lists(numbers, min_size=size, max_size=size),
        numbers.map(lambda value: [value] * size),
        st.tuples(numbers, st.integers(0, size - 1)).map(
            lambda pair: [0.0] * pair[1] + [pair[0]] + [0.0] * (size - 1 - pair[1])
        ),
    )


dtypes = st.sampled_from([torch.bfloat16, torch.float32])


def tensor_of(block: list[float], dtype: torch.dtype) -> tuple[Tensor, np.ndarray]:
    x = torch.tensor(block, dtype=torch.float32).to(dtype)
    return x, x.float().numpy()


def bits_equal(ours: Tensor, expected: list[float]) -> bool:
    """Equality that tells 0 from -0."""
    wanted = torch.tensor(expected, dtype=torch.float64)
    signs = torch.equal(torch.signbit(ours.double()), torch.signbit(wanted))
    return torch.equal(ours.double(), wanted) and signs


@settings(max_examples=300, deadline=None)
@given(blocks(32), dtypes)
def test_fp8_values_and_scale_follow_the_definition(block: list[float], dtype: torch.dtype) -> None:
    x, values = tensor_of(block, dtype)
    expected, scale = naive_fp8(values)
    _, scale_byte = quantize_fp8(x)
    assert float(ue8m0_value(scale_byte)) == scale
    assert bits_equal(round_fp8(x), expected)


@settings(max_examples=300, deadline=None)
@given(blocks(32), dtypes)
def test_fp4_index_values_and_scale_follow_the_definition(
    block: list[float], dtype: torch.dtype
) -> None:
    x, values = tensor_of(block, dtype)
    expected, scale = naive_fp4_index(values)
    codes, scale_byte = quantize_fp4_index(x)
    assert float(ue8m0_value(scale_byte)) == scale
    assert bits_equal(dequantize_fp4_index(codes, scale_byte, torch.float64), expected)
    assert torch.equal(round_fp4_index(x).double(), torch.tensor(expected).to(dtype).double())


@settings(max_examples=300, deadline=None)
@given(blocks(16), dtypes)
def test_fp4_main_values_and_scale_follow_the_definition(
    block: list[float], dtype: torch.dtype
) -> None:
    x, values = tensor_of(block, dtype)
    expected, scale = naive_fp4_main(values)
    codes, scale_byte = quantize_fp4_main(x)
    assert float(scale_byte.view(torch.float8_e4m3fn).float()) == scale
    assert bits_equal(dequantize_fp4_main(codes, scale_byte, torch.float64), expected)
    assert bits_equal(round_fp4_main(x), expected)


def test_every_code_is_a_fixed_point() -> None:
    for sign in (1, -1):
        for code in E2M1:
            assert round_fp4_index(torch.tensor([6.0, sign * code] * 16))[1] == sign * code
            assert round_fp4_main(torch.tensor([6.0, sign * code] * 8))[1] == sign * code
        for code in E4M3:
            assert round_fp8(torch.tensor([448.0, sign * code] * 16))[1] == sign * code


def test_all_scale_bytes_have_their_value() -> None:
    values = ue8m0_value(torch.arange(255, dtype=torch.uint8))
    assert values.tolist() == [2.0 ** (byte - 127) for byte in range(255)]


@settings(max_examples=100, deadline=None)
@given(st.lists(blocks(32), min_size=2, max_size=2))
def test_a_block_is_quantised_without_its_neighbours(pair: list[list[float]]) -> None:
    both = torch.tensor([pair[0] + pair[1]])
    for function in (round_fp8, round_fp4_index, round_fp4_main):
        halves = [function(torch.tensor([block])) for block in pair]
        assert torch.equal(function(both), torch.cat(halves, dim=1))


@settings(max_examples=100, deadline=None)
@given(st.lists(blocks(32), min_size=1, max_size=5), st.data())
def test_stored_rows_are_read_back_as_rounded(rows: list[list[float]], data: st.DataObject) -> None:
    x = torch.tensor(rows).bfloat16()
    places = data.draw(st.permutations(range(8)))[: len(rows)]
    index = torch.tensor([data.draw(st.sampled_from([place, -1])) for place in places])
    for store, load, function, size in (
        (store_window_rows, load_window_rows, round_fp8, 33),
        (store_main_rows, load_main_rows, round_fp4_main, 18),
        (store_index_rows, load_index_rows, round_fp4_index, 17),
    ):
        pool = torch.full((8, size), 0xFF, dtype=torch.uint8)
        store(pool, index, x)
        expected = torch.where((index >= 0).unsqueeze(1), function(x), torch.zeros_like(x))
        assert torch.equal(load(pool, index, torch.bfloat16), expected)
        untouched = [row for row in range(8) if row not in index.tolist()]
        assert bool((pool[untouched] == 0xFF).all())


def test_nan_stays_in_its_row() -> None:
    """Rows with NaN are written and read like others; values that must show it do, the row beside it is whole."""
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    broken = x.clone()
    broken[0, 5] = torch.nan
    for store, load, size, shows_nan in (
        (store_window_rows, load_window_rows, 66, True),
        (store_main_rows, load_main_rows, 36, True),
        (store_index_rows, load_index_rows, 34, False),  # its scale is a power of two
    ):
        pools = [torch.zeros(2, size, dtype=torch.uint8) for _ in range(2)]
        store(pools[0], torch.arange(2), broken)
        store(pools[1], torch.arange(2), x)
        rows = [load(pool, torch.arange(2), torch.float32) for pool in pools]
        assert torch.equal(rows[0][1], rows[1][1])
        assert bool(rows[0][0].isnan().any()) == shows_nan
