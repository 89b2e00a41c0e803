"""FP4 quantisers of few rows with numpy, bit-equal to the reference: index flavour `Q4i` and cache rows `Q4k`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import is_small, register, rounded, widened
from dsserve_kernels.reference import kvcache as reference_rows
from dsserve_kernels.reference import quant as reference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.arrays import Float32

_MAX, _INVERSE_MAX = np.float32(6), np.float32(1.0 / 6.0)
_INDEX_FLOOR, _MAIN_FLOOR = np.float32(6 * 2.0**-126), np.float32(6 * 2.0**-9)
_LEAST_SCALE, _MOST_SCALE = np.float32(2.0**-9), np.float32(448)
_MANTISSA, _EXPONENT = np.int32(0x7FFFFF), np.int32(0x7F800000)
_ONE = np.int32(127 << 23)
#: Turns the bits of 2^e into those of 1.5 * 2^(e + 22): adding that number rounds to steps of 2^(e - 1).
_TO_ROUNDER = np.int32((22 << 23) + 0x400000)
#: Code of twice a magnitude.
_CODES = np.array([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=np.uint8)


def round_fp4_index(x: Tensor) -> Tensor:
    """See `reference.quant.round_fp4_index`; the sign of zeros is lost."""
    if not is_small(x):
        return reference.round_fp4_index(x)
    values, scale = _scaled_index(widened(x))
    result = _round_e2m1(values)
    np.multiply(result, scale, result)
    return rounded(result.reshape(x.shape), x.dtype)


def store_index_rows(pool: Tensor, index: Tensor, rows: Tensor) -> None:
    """See `reference.kvcache.store_index_rows`."""
    wide = _finite(rows)
    if wide is None:
        reference_rows.store_index_rows(pool, index, rows)
        return
    values, scale = _scaled_index(wide)
    scale_bytes = (scale.view(np.int32) >> 23).astype(np.uint8)
    _store(pool, index, _packed(values, wide), scale_bytes.reshape(len(wide), -1))


def store_main_rows(pool: Tensor, index: Tensor, rows: Tensor) -> None:
    """See `reference.kvcache.store_main_rows`."""
    wide = _finite(rows)
    if wide is None:
        reference_rows.store_main_rows(pool, index, rows)
        return
    blocks = wide.reshape(-1, 16)
    largest = np.maximum(np.maximum.reduce(np.abs(blocks), 1, keepdims=True), _MAIN_FLOOR)
    scale = np.minimum(np.maximum(largest / _MAX, _LEAST_SCALE), _MOST_SCALE)
    codes = torch.from_numpy(scale).to(torch.float8_e4m3fn)
    values = blocks / codes.float().numpy()
    np.minimum(values, _MAX, out=values)
    np.maximum(values, -_MAX, out=values)
    scale_bytes = codes.view(torch.uint8).numpy()
    _store(pool, index, _packed(values, wide), scale_bytes.reshape(len(wide), -1))


def _finite(rows: Tensor) -> Float32 | None:
    """Few rows of finite numbers as an array; others are the reference's."""
    if not is_small(rows):
        return None
    wide = np.ascontiguousarray(widened(rows))
    return wide if np.isfinite(np.add.reduce(np.abs(wide), None)) else None


def _scaled_index(wide: Float32) -> tuple[Float32, Float32]:
    """Values divided by their scale [n, 32] and the scales [n, 1] of `Q4i`."""
    blocks = wide.reshape(-1, 32)
    scale: Float32 = np.maximum.reduce(np.abs(blocks), 1, keepdims=True)
    np.maximum(scale, _INDEX_FLOOR, out=scale)
    np.multiply(scale, _INVERSE_MAX, scale)
    bits = scale.view(np.int32)
    np.add(bits, _MANTISSA, bits)
    np.bitwise_and(bits, _EXPONENT, bits)
    values: Float32 = blocks / scale
    np.minimum(values, _MAX, out=values)
    np.maximum(values, -_MAX, out=values)
    return values, scale


def _round_e2m1(values: Float32) -> Float32:
    """Nearest E2M1 numbers, ties to the even code; zeros come out positive."""
    power = values.view(np.int32) & _EXPONENT
    np.maximum(power, _ONE, out=power)
    np.add(power, _TO_ROUNDER, power)
    rounder = power.view(np.float32)
    result: Float32 = values + rounder
    np.subtract(result, rounder, result)
    return result


def _packed(values: Float32, wide: Float32) -> NDArray[np.uint8]:
    """Two codes a byte, the even column in the low nibble: [T, d / 2]; signs are those of `wide` [T, d]."""
    twice = np.abs(_round_e2m1(values))
    np.add(twice, twice, twice)
    codes = _CODES.take(twice.astype(np.int64)).reshape(wide.shape)
    codes |= np.signbit(wide).view(np.uint8) << np.uint8(3)
    packed: NDArray[np.uint8] = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return packed


def _store(
    pool: Tensor, index: Tensor, codes: NDArray[np.uint8], scales: NDArray[np.uint8]
) -> None:
    raw, where = np.concatenate((codes, scales), 1), index.numpy()
    kept = where >= 0
    if kept.all():
        pool.numpy()[where] = raw
    else:
        pool.numpy()[where[kept]] = raw[kept]


register(round_fp4_index)
register(store_index_rows)
register(store_main_rows)
