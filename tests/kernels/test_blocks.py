"""The building blocks of the golden data: quantisers, mHC, router, rotary tables, candidates, stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from dsserve_kernels.reference.norm import rope, rope_frequencies, rope_table, yarn_frequencies
from dsserve_kernels.reference.quant import (
    dequantize_fp8,
    dequantize_weight_fp4,
    dequantize_weight_fp8,
    quantize_fp8,
    round_fp4_index,
    round_fp4_main,
    round_fp8,
)
from dsserve_kernels.select import REGISTRY

if TYPE_CHECKING:
    from torch import Tensor

FILE = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a" / "blocks.safetensors"


@pytest.fixture(scope="module")
def blocks() -> dict[str, Tensor]:
    return load_file(FILE)


def bodies(operator: str) -> pytest.MarkDecorator:
    entries = REGISTRY.by_operator[operator]
    return pytest.mark.parametrize(
        "body", [entry.body for entry in entries], ids=[entry.name for entry in entries]
    )


def test_fp8_quantiser_gives_the_golden_codes_and_scales(blocks: dict[str, Tensor]) -> None:
    codes, scales = quantize_fp8(blocks["quant.x"])
    assert torch.equal(codes.view(torch.uint8), blocks["quant.fp8_g32.codes"])
    assert torch.equal(scales, blocks["quant.fp8_g32.scale_e8m0"])
    expected = blocks["quant.fp8_g32.roundtrip"]
    assert torch.equal(dequantize_fp8(codes, scales), expected.float())
    assert torch.equal(round_fp8(blocks["quant.x"]), expected)


def test_fp4_quantisers_give_the_golden_values(blocks: dict[str, Tensor]) -> None:
    x = blocks["quant.x"]
    assert torch.equal(round_fp4_index(x), blocks["quant.fp4_g32_e8m0.roundtrip"])
    assert torch.equal(round_fp4_main(x), blocks["quant.fp4_g16_e4m3.roundtrip"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stored_weights_have_the_golden_values(
    blocks: dict[str, Tensor], dtype: torch.dtype
) -> None:
    codes = blocks["weight_fp8.codes"].view(torch.float8_e4m3fn)
    fp8 = dequantize_weight_fp8(codes, blocks["weight_fp8.scale_e8m0"], dtype)
    assert torch.equal(fp8, blocks["weight_fp8.dequant"].to(dtype))
    packed = blocks["weight_fp4.packed_i8"].view(torch.uint8)
    fp4 = dequantize_weight_fp4(packed, blocks["weight_fp4.scale_e8m0"], dtype)
    assert torch.equal(fp4, blocks["weight_fp4.dequant"].to(dtype))


@bodies("hc_split_sinkhorn")
def test_gates_and_mixing_matrix_are_golden(blocks: dict[str, Tensor], body) -> None:
    results = body(
        blocks["mhc.mixes"],
        blocks["mhc.base"],
        blocks["mhc.scale"],
        num_streams=4,
        rounds=20,
        eps=1e-6,
    )
    for name, ours in zip(("pre", "post", "comb"), results, strict=True):
        expected = blocks[f"mhc.{name}"]
        assert (ours - expected).abs().max() < 2.5e-7, name
    columns = results[2].sum(1)
    assert (columns - 1).abs().max() < 1e-5


@bodies("hc_split_sinkhorn")
def test_a_round_less_is_seen(blocks: dict[str, Tensor], body) -> None:
    """The comparison above is sharp enough to tell 19 rounds from 20."""
    _, _, comb = body(
        blocks["mhc.mixes"],
        blocks["mhc.base"],
        blocks["mhc.scale"],
        num_streams=4,
        rounds=19,
        eps=1e-6,
    )
    assert (comb - blocks["mhc.comb"]).abs().max() > 1e-6


@bodies("route_experts")
def test_router_chooses_and_weighs_as_golden(blocks: dict[str, Tensor], body) -> None:
    ids, weights = body(
        blocks["gate.x"],
        blocks["gate.weight"].double(),
        blocks["gate.bias"].unsqueeze(0),
        top_k=6,
        scale=1.5,
        temperature=1.0,
    )
    assert torch.equal(ids, blocks["gate.ids"].long())
    expected = blocks["gate.weights"]
    assert ((weights - expected).abs() / expected).max() < 1e-6


def test_rotary_tables_are_golden(blocks: dict[str, Tensor]) -> None:
    plain = rope_table(rope_frequencies(64, 10000.0), 512)
    assert torch.equal(plain, blocks["rope.window.cos_sin"])
    positions = blocks["rope.compressed.positions"]
    assert torch.equal(released_yarn(int(positions.max()) + 1)[positions], yarn_golden(blocks))


def released_yarn(length: int) -> Tensor:
    frequencies = yarn_frequencies(
        64, 160000.0, factor=16.0, beta_fast=32.0, beta_slow=1.0, original_length=65536
    )
    return rope_table(frequencies, length)


def yarn_golden(blocks: dict[str, Tensor]) -> Tensor:
    return blocks["rope.compressed.cos_sin"]


@bodies("rope")
def test_rotation_is_golden(blocks: dict[str, Tensor], body) -> None:
    x, table = blocks["rope.x"][0], released_yarn(8)
    ours = body(x, table)
    assert (ours - blocks["rope.y_compressed_pos0_7"][0]).abs().max() < 1e-6
    back = body(ours, table, inverse=True)
    assert (back - x).abs().max() < 1e-5


def test_reference_rotation_is_golden_bit_for_bit(blocks: dict[str, Tensor]) -> None:
    assert torch.equal(
        rope(blocks["rope.x"][0], released_yarn(8)), blocks["rope.y_compressed_pos0_7"][0]
    )


@bodies("candidate_mask")
def test_candidates_are_golden(blocks: dict[str, Tensor], body) -> None:
    mask = body(
        blocks["candidates.scores"][0], blocks["candidates.lens"], block_size=8, num_blocks=4
    )
    expected = blocks["candidates.mask_topk4_block8"][0]
    visible = torch.arange(50) < blocks["candidates.lens"].unsqueeze(1)
    assert torch.equal(mask & visible, expected & visible)
