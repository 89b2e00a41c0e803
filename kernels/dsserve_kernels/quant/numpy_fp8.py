"""`Q8` of few rows with numpy, bit-equal to the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.reference import quant as reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsserve_kernels.arrays import Float32, Float64

_FLOOR = np.float32(1e-4)
_INVERSE_MAX = np.float32(1.0 / reference.E4M3_MAX)
_MANTISSA = np.int32(0x7FFFFF)
_EXPONENT = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
#: Elements from which torch finds the maxima in less time.
_TORCH_SIZE = 1 << 11
#: Bits of 2^-6, the least normal E4M3 number: below it the step stays the same.
_LEAST_POWER = np.int32((127 - 6) << 23)
#: From 2^-6 to 2^-126.
_TO_CODE = np.float32(2.0**-120)
#: Turns the bits of 2^e into those of 1.5 * 2^(e + 20): adding that number rounds to steps of 2^(e - 3).
_TO_ROUNDER = np.int32((20 << 23) + 0x400000)


def scaled(x: Float32) -> tuple[Float32, Float32]:
    """Quotients [.., 32] of all blocks in order, and their scales [.., 1]."""
    blocks = x.reshape(-1, 32)
    scale = _largest(blocks)
    np.maximum(scale, _FLOOR, out=scale)
    np.multiply(scale, _INVERSE_MAX, scale)
    bits = scale.view(np.int32)
    np.add(bits, _MANTISSA, bits)
    np.bitwise_and(bits, _EXPONENT, bits)
    scale = scale[:, None]
    return blocks / scale, scale


def _largest(blocks: Float32) -> Float32:
    """Largest magnitude of each block [n, 32] -> [n]; NaN if there is one."""
    if blocks.size >= _TORCH_SIZE:
        by_torch: Float32 = torch.from_numpy(blocks).abs().amax(1).numpy()
        return by_torch
    # Magnitudes are ordered as their bits are, NaN last; numpy's integer maximum is its faster one.
    by_bits: Float32 = np.maximum.reduce(blocks.view(np.int32) & _MAGNITUDE, 1).view(np.float32)
    return by_bits


def round_e4m3(quotients: Float32) -> Float32:
    """Nearest E4M3 numbers, ties to even, for magnitudes up to 448 and an ulp; zeros come out positive."""
    power = quotients.view(np.int32) & _EXPONENT
    np.maximum(power, _LEAST_POWER, out=power)
    np.add(power, _TO_ROUNDER, power)
    rounder = power.view(np.float32)
    result: Float32 = quotients + rounder
    np.subtract(result, rounder, result)
    return result


def round_fp8_array(x: Float32) -> Float64:
    """The values of `x` after `Q8`, like `reference.round_fp8_wide`; only the sign of zeros is lost."""
    quotients, scale = scaled(x)
    values = round_e4m3(quotients)
    np.multiply(values, scale, values)
    return values.astype(np.float64).reshape(x.shape)


def e4m3_codes(rounded: Float32, quotients: Float32) -> NDArray[np.uint8]:
    """E4M3 codes of quotients that `round_e4m3` rounded, in their shape; what is no number has the code of NaN."""
    # The least normal number becomes the least normal float32, so that exponent, mantissa and the numbers below it
    # have the bits of the codes.
    codes = (np.abs(rounded) * _TO_CODE).view(np.int32) >> np.int32(20)
    np.minimum(codes, np.int32(0x7F), out=codes)
    np.bitwise_or(codes, (quotients.view(np.int32) >> np.int32(24)) & np.int32(0x80), codes)
    return codes.astype(np.uint8)
