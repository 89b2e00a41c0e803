"""Window rows and compressed rows of few tokens with numpy, bit-equal to the reference.

Reading is a look-up: a table of 256 values for the codes of a byte, another for its scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import register, rounded, row_blocks, widened
from dsserve_kernels.quant.numpy_fp8 import e4m3_codes, round_e4m3, scaled
from dsserve_kernels.reference import kvcache as reference
from dsserve_kernels.reference.quant import ue8m0_value, unpack_e2m1

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.arrays import Float32, Float64

_BYTES = torch.arange(256, dtype=torch.uint8)
#: Values of each byte as E4M3 number, as UE8M0 scale, and as a pair of E2M1 numbers.
E4M3_VALUES: Float32 = _BYTES.view(torch.float8_e4m3fn).float().numpy()
UE8M0_VALUES: Float32 = ue8m0_value(_BYTES).numpy()
_E2M1_PAIR: Float32 = unpack_e2m1(_BYTES.view(256, 1)).numpy()
#: The same pairs as one 8-byte entry each, which is looked up at once.
_E2M1_PAIR_BITS: NDArray[np.int64] = _E2M1_PAIR.view(np.int64)[:, 0].copy()
#: The same in float64, a pair in the 16 bytes of a complex number.
_WIDE_PAIR: NDArray[np.complex128] = _E2M1_PAIR.astype(np.float64).view(np.complex128)[:, 0].copy()
_E4M3_WIDE: Float64 = E4M3_VALUES.astype(np.float64)


def load_window_rows(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.kvcache.load_window_rows`."""
    raw, missing = _load(pool, index)
    dim = raw.shape[-1] * 32 // 33
    return rounded(
        _scaled(E4M3_VALUES.take(raw[..., :dim]), UE8M0_VALUES.take(raw[..., dim:]), missing), dtype
    )


def load_main_rows(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.kvcache.load_main_rows`."""
    raw, missing = _load(pool, index)
    packed = raw.shape[-1] * 8 // 9
    return rounded(
        _scaled(_pairs(raw[..., :packed]), E4M3_VALUES.take(raw[..., packed:]), missing), dtype
    )


def load_index_rows(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.kvcache.load_index_rows`."""
    raw, missing = _load(pool, index)
    packed = raw.shape[-1] * 16 // 17
    return rounded(
        _scaled(_pairs(raw[..., :packed]), UE8M0_VALUES.take(raw[..., packed:]), missing), dtype
    )


def store_window_rows(pool: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """See `reference.kvcache.store_window_rows`."""
    if rows.numel() == 0:
        return reference.store_window_rows(pool, index, rows)
    where, stored = index.numpy(), pool.numpy()
    out = torch.empty_like(rows)
    for block in row_blocks(*rows.shape):
        raw, values = window_rows(widened(rows[block]))
        kept = where[block] >= 0
        if kept.all():
            stored[where[block]] = raw
        else:
            stored[where[block][kept]] = raw[kept]
        out[block] = torch.from_numpy(values)
    return out


def window_rows(rows: Float32) -> tuple[NDArray[np.uint8], Float32]:
    """The bytes of window rows [T, d], and their values as they read back."""
    quotients, scale = scaled(rows)
    count, dim = rows.shape
    raw = np.empty((count, dim + dim // 32), dtype=np.uint8)
    values = round_e4m3(quotients)
    raw[:, :dim] = e4m3_codes(values, quotients).reshape(count, dim)
    raw[:, dim:] = (scale.view(np.int32) >> 23).reshape(count, -1)
    # Codes keep the sign of a zero, the rounding by addition does not.
    np.copysign(values, quotients, values)
    np.multiply(values, scale, values)
    return raw, values.reshape(count, dim)


def window_values(raw: NDArray[np.uint8]) -> Float32:
    """Values [n, d] of the bytes of window rows."""
    dim = raw.shape[-1] * 32 // 33
    return _scaled(E4M3_VALUES.take(raw[..., :dim]), UE8M0_VALUES.take(raw[..., dim:]), None)


def main_values(pool: NDArray[np.uint8], index: NDArray[np.int64]) -> Float64:
    """Values [.., d] of compressed rows at `index` [..]; those of any row where it is -1."""
    raw = pool.take(index, 0, mode="clip")
    packed = raw.shape[-1] * 8 // 9
    values: Float64 = _WIDE_PAIR.take(raw[..., :packed]).view(np.float64)
    scales = _E4M3_WIDE.take(raw[..., packed:])
    groups = values.reshape(*scales.shape, -1)
    np.multiply(groups, scales[..., None], groups)
    return values


def _load(pool: Tensor, index: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.bool_] | None]:
    """Raw rows at `index` [..], any row where it is -1, and where that is (None if nowhere)."""
    where = index.numpy()
    missing = where < 0
    return pool.numpy().take(where, 0, mode="clip"), missing if missing.any() else None


def _pairs(packed: NDArray[np.uint8]) -> Float32:
    """E2M1 values of packed bytes: [.., n / 2] -> [.., n]."""
    values: Float32 = _E2M1_PAIR_BITS.take(packed).view(np.float32)
    return values


def _scaled(values: Float32, scales: Float32, missing: NDArray[np.bool_] | None) -> Float32:
    """Values times the scale of their group, zeros where a row is missing."""
    groups = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    np.multiply(groups, scales[..., None], groups)
    if missing is not None:
        groups[missing] = 0
    return values


register(load_window_rows)
register(load_main_rows)
register(load_index_rows)
register(store_window_rows)
