"""Quantisers and their inverses, bit for bit (model.md section 2 and 11, weights.md section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.registry import reference

E4M3_MAX = 448.0
E2M1_MAX = 6.0
#: Magnitudes of the eight E2M1 codes.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Midpoints between neighbouring magnitudes; a tie goes to the even code (see `_e2m1_codes`).
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pow2_ceil(x: Tensor) -> Tensor:
    """The next power of two at or above each positive normal float32, on its bits."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def ue8m0_byte(scale: Tensor) -> Tensor:
    """UE8M0 byte (exponent + 127) of powers of two."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def ue8m0_value(byte: Tensor) -> Tensor:
    """float32 value of UE8M0 bytes; byte 0 is 2^-127 (a subnormal float32)."""
    exponent = byte.to(torch.int32)
    normal = (exponent << 23).view(torch.float32)
    return torch.where(exponent == 0, torch.full_like(normal, 2.0**-127), normal)


def _blocks(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Q8`: E4M3 codes and UE8M0 bytes per 32 columns.

    Args:
        x: [..., n] float, n a multiple of 32.

    Returns:
        codes [..., n] float8_e4m3fn and scale bytes [..., n / 32] uint8.
    """
    blocks = _blocks(x.float(), 32)
    amax = blocks.abs().amax(-1).clamp_min(1e-4)
    scale = pow2_ceil(amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32))
    codes = (blocks / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.reshape(x.shape), ue8m0_byte(scale)


def dequantize_fp8(codes: Tensor, scale_bytes: Tensor) -> Tensor:
    """float32 values of `quantize_fp8`'s result."""
    blocks = _blocks(codes.float(), 32) * ue8m0_value(scale_bytes).unsqueeze(-1)
    return blocks.reshape(codes.shape)


@reference("round_fp8")
def round_fp8(x: Tensor) -> Tensor:
    """`Q8` in place use: the values after the round trip, in the dtype of `x` (exact in BF16)."""
    return dequantize_fp8(*quantize_fp8(x)).to(x.dtype)


def _e2m1_codes(magnitude: Tensor) -> Tensor:
    """Codes 0..7 of non-negative values up to 6, round to nearest, ties to the even code."""
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, midpoint in enumerate(_E2M1_MIDPOINTS):
        above = magnitude > midpoint if index % 2 == 0 else magnitude >= midpoint
        code += above.to(torch.uint8)
    return code


def _pack_e2m1(values: Tensor) -> Tensor:
    """Values already divided by their scale and clamped -> two codes a byte, even column in the low nibble."""
    code = _e2m1_codes(values.abs()) | (torch.signbit(values).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


#: The 256 pairs of values that a packed byte stands for, built once per device and dtype.
_PAIRS: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def unpack_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of packed codes: [..., n / 2] uint8 -> [..., n]."""
    key = (packed.device, dtype)
    if key not in _PAIRS:
        half = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=dtype)
        byte = torch.arange(256)
        _PAIRS[key] = torch.stack((half[byte & 15], half[byte >> 4]), dim=-1).to(packed.device)
    pairs = _PAIRS[key][packed.int()]
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def quantize_fp4_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Q4i`: packed E2M1 codes and UE8M0 bytes per 32 columns (index queries and keys)."""
    blocks = _blocks(x.float(), 32)
    amax = blocks.abs().amax(-1).clamp_min(6 * 2.0**-126)
    scale = pow2_ceil(amax * torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32))
    values = (blocks / scale.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX).reshape(x.shape)
    return _pack_e2m1(values), ue8m0_byte(scale)


def dequantize_fp4_index(
    packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values of `quantize_fp4_index`'s result."""
    values = _blocks(unpack_e2m1(packed, dtype), 32) * ue8m0_value(scale_bytes).to(dtype).unsqueeze(
        -1
    )
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


@reference("round_fp4_index")
def round_fp4_index(x: Tensor) -> Tensor:
    """`Q4i` in place use, in the dtype of `x`."""
    return dequantize_fp4_index(*quantize_fp4_index(x)).to(x.dtype)


def quantize_fp4_main(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Q4k`: packed E2M1 codes and E4M3 scale bytes per 16 columns (compressed rows)."""
    blocks = _blocks(x.float(), 16)
    amax = blocks.abs().amax(-1).clamp_min(6 * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
    values = (blocks / scale.float().unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX).reshape(x.shape)
    return _pack_e2m1(values), scale.view(torch.uint8)


def dequantize_fp4_main(
    packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values of `quantize_fp4_main`'s result (exact in BF16)."""
    scale = scale_bytes.contiguous().view(torch.float8_e4m3fn).to(dtype)
    values = _blocks(unpack_e2m1(packed, dtype), 16) * scale.unsqueeze(-1)
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


@reference("round_fp4_main")
def round_fp4_main(x: Tensor) -> Tensor:
    """`Q4k` in place use, in the dtype of `x`."""
    return dequantize_fp4_main(*quantize_fp4_main(x)).to(x.dtype)


def dequantize_weight_fp8(codes: Tensor, scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """A dense FP8 weight: E4M3 [out, in] with one UE8M0 byte per 32x32 tile."""
    scale = ue8m0_value(scale_bytes).repeat_interleave(32, 0)[: codes.shape[0]]
    scale = scale.repeat_interleave(32, 1)[:, : codes.shape[1]]
    return codes.to(dtype) * scale.to(dtype)


def dequantize_weight_fp4(packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """A routed expert's weight: packed E2M1 [out, in / 2] with one UE8M0 byte per row and 32 inputs."""
    return dequantize_fp4_index(packed, scale_bytes, dtype)
