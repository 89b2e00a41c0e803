"""Quantisers and their inverses, bit for bit (model.md section 2 and 11, weights.md section 2)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsserve_kernels.registry import reference

E4M3_MAX = 448.0
E2M1_MAX = 6.0
#: Magnitudes of the eight E2M1 codes.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pow2_ceil(x: Tensor) -> Tensor:
    """The next power of two at or above each positive normal float32, on its bits."""
    # Adding all mantissa bits carries into the exponent unless the mantissa is zero.
    return ((x.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def ue8m0_byte(scale: Tensor) -> Tensor:
    """UE8M0 byte (exponent + 127) of powers of two."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def ue8m0_value(byte: Tensor) -> Tensor:
    """float32 value of UE8M0 bytes; byte 0 is 2^-127 (a subnormal float32)."""
    # Bit 22 alone is 2^-127; it is shifted out of every other exponent.
    exponent = byte.to(torch.int32)
    return ((exponent << 23) | ((exponent == 0).to(torch.int32) << 22)).view(torch.float32)


def _blocks(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _scaled_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [.., n / 32, 32] and float32 scales [.., n / 32, 1] of `Q8`."""
    blocks = _blocks(x.float(), 32)
    scale = pow2_ceil(blocks.abs().amax(-1, keepdim=True).clamp_min_(1e-4).mul_(1.0 / E4M3_MAX))
    # No clamp: the scale bounds the quotient by 448 plus one ulp, which rounds to 448.
    return (blocks / scale).to(torch.float8_e4m3fn), scale


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Q8`: E4M3 codes and UE8M0 bytes per 32 columns.

    Args:
        x: [..., n] float, n a multiple of 32.

    Returns:
        codes [..., n] float8_e4m3fn and scale bytes [..., n / 32] uint8.
    """
    codes, scale = _scaled_fp8(x)
    return codes.view(x.shape), ue8m0_byte(scale.squeeze(-1))


def dequantize_fp8(codes: Tensor, scale_bytes: Tensor) -> Tensor:
    """float32 values of `quantize_fp8`'s result."""
    blocks = _blocks(codes.float(), 32) * ue8m0_value(scale_bytes).unsqueeze(-1)
    return blocks.view(codes.shape)


def round_fp8_wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of `x` after `Q8`, in a dtype that holds them exactly."""
    codes, scale = _scaled_fp8(x)
    return (codes.to(dtype) * scale.to(dtype)).view(x.shape)


@reference("round_fp8")
def round_fp8(x: Tensor) -> Tensor:
    """`Q8` in place use: the values after the round trip, in the dtype of `x` (exact in BF16)."""
    return round_fp8_wide(x, x.dtype)


def _round_e2m1(values: Tensor) -> Tensor:
    """Values up to 6 in magnitude, rounded to E2M1: nearest, ties to the even code."""
    # The step is 0.5 below 2, then 1, then 2: half the power of two of the value, at least that of 1.
    power = (values.view(torch.int32) & 0x7F800000).clamp_min_(127 << 23).view(torch.float32)
    return (values * 2 / power).round_() * (power * 0.5)


@cache
def _code_of_twice(device: torch.device) -> Tensor:
    """Code of twice each magnitude, 0..12 (entries that are no magnitude are unused); copied once per device."""
    return torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8).to(device)


def _pack_e2m1(values: Tensor) -> Tensor:
    """Values already divided by their scale and clamped -> two codes a byte, even column in the low nibble."""
    # NaN has no code, and as an integer no place in the table: its block's scale carries it.
    twice = (_round_e2m1(values).abs_() * 2).int().clamp_(0, 12)
    code = _code_of_twice(values.device)[twice] | (torch.signbit(values).to(torch.uint8) << 3)
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


def _scaled_fp4_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values divided by their scale [.., n / 32, 32] and the scales [.., n / 32, 1] of `Q4i`."""
    blocks = _blocks(x.float(), 32)
    scale = pow2_ceil(
        blocks.abs().amax(-1, keepdim=True).clamp_min_(6 * 2.0**-126).mul_(1.0 / E2M1_MAX)
    )
    return (blocks / scale).clamp_(-E2M1_MAX, E2M1_MAX), scale


def quantize_fp4_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Q4i`: packed E2M1 codes and UE8M0 bytes per 32 columns (index queries and keys)."""
    values, scale = _scaled_fp4_index(x)
    return _pack_e2m1(values.view(x.shape)), ue8m0_byte(scale.squeeze(-1))


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
    values, scale = _scaled_fp4_index(x)
    return (_round_e2m1(values) * scale).view(x.shape).to(x.dtype)


def quantize_fp4_main(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Q4k`: packed E2M1 codes and E4M3 scale bytes per 16 columns (compressed rows)."""
    blocks = _blocks(x.float(), 16)
    amax = blocks.abs().amax(-1).clamp_min(6 * 2.0**-9)
    # By a tensor: CUDA multiplies by the rounded reciprocal of a number.
    scale = (amax / amax.new_full((), E2M1_MAX)).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
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
