"""Weight encoders: stored codes decode to what was meant, bit for bit where it is exact."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open

from dsserve.errors import ConfigError
from dsserve.models.deepseek_v4.weight_codes import (
    E2M1_VALUES,
    decode_fp4,
    decode_fp8,
    encode_fp4,
    encode_fp8,
)

BLOCKS = Path(__file__).resolve().parents[1] / "golden/data/v41-tiny-a/blocks.safetensors"


def golden_blocks(*names: str) -> list[torch.Tensor]:
    with safe_open(BLOCKS, "pt") as file:
        return [file.get_tensor(name) for name in names]


def test_golden_fp8_bytes_decode_to_the_golden_values() -> None:
    codes, scale, expected = golden_blocks(
        "weight_fp8.codes", "weight_fp8.scale_e8m0", "weight_fp8.dequant"
    )
    assert torch.equal(decode_fp8(codes.view(torch.float8_e4m3fn), scale), expected)


def test_golden_fp4_bytes_decode_to_the_golden_values() -> None:
    packed, scale, expected = golden_blocks(
        "weight_fp4.packed_i8", "weight_fp4.scale_e8m0", "weight_fp4.dequant"
    )
    assert torch.equal(decode_fp4(packed.view(torch.uint8), scale), expected)


def test_golden_values_encode_and_decode_unchanged() -> None:
    fp8, fp4 = golden_blocks("weight_fp8.dequant", "weight_fp4.dequant")
    assert torch.equal(decode_fp8(*encode_fp8(fp8, block_rows=32, block_columns=32)), fp8)
    assert torch.equal(decode_fp4(*encode_fp4(fp4, block=32)), fp4)


def test_even_column_is_the_low_nibble() -> None:
    values = torch.zeros(1, 32)
    values[0, 0], values[0, 1] = 6.0, -1.5
    packed, scale = encode_fp4(values, block=32)
    assert packed[0, 0].item() == 7 | (11 << 4)
    assert scale.tolist() == [[127]]


def test_fp4_ties_go_to_the_even_code() -> None:
    ties = [(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES)]
    values = torch.tensor([[*ties, 6.0, *[0.0] * 24]])
    assert decode_fp4(*encode_fp4(values, block=32))[0, :7].tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(("magnitude", "code"), [(448.0, 127), (448.5, 128), (224.0, 126)])
def test_fp8_scale_is_the_smallest_that_fits(magnitude: float, code: int) -> None:
    values = torch.full((32, 32), magnitude)
    _, scale = encode_fp8(values, block_rows=32, block_columns=32)
    assert scale.tolist() == [[code]]


def test_blocks_at_the_edge_may_be_partial() -> None:
    values = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    codes, scale = encode_fp8(values, block_rows=32, block_columns=32)
    assert codes.shape == (40, 50)
    assert scale.shape == (2, 2)
    assert (decode_fp8(codes, scale) - values).abs().max() < 0.07 * values.abs().max()


def test_row_blocks_scale_each_row_by_itself() -> None:
    values = torch.tensor([[1.0], [1024.0]]).expand(2, 64).contiguous()
    codes, scale = encode_fp8(values, block_rows=1, block_columns=32)
    assert scale.shape == (2, 2)
    assert torch.equal(decode_fp8(codes, scale), values)


def test_empty_block_has_scale_one() -> None:
    codes, scale = encode_fp8(torch.zeros(32, 32), block_rows=32, block_columns=32)
    assert scale.tolist() == [[127]]
    assert not decode_fp8(codes, scale).any()


def test_fp4_refuses_ragged_columns() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        encode_fp4(torch.zeros(1, 33), block=32)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=32, max_size=32),
    st.integers(-20, 20),
)
@example([1e3] * 31 + [0.0], 20)
@example([0.0] * 31 + [2.0**-149], 0)  # below what the smallest scale can hold
def test_rounding_error_is_bounded_by_the_format(row: list[float], exponent: int) -> None:
    values = torch.tensor([row]) * 2.0**exponent
    largest = values.abs().max()
    fp8 = decode_fp8(*encode_fp8(values, block_rows=1, block_columns=32))
    fp4 = decode_fp4(*encode_fp4(values, block=32))
    # Half of the last place of the largest value, or half of the smallest step under the smallest scale.
    assert (fp8 - values).abs().max() <= max(largest / 16, 2.0 ** (-127 - 10))
    assert (fp4 - values).abs().max() <= max(largest / 3, 2.0 ** (-127 - 2))
