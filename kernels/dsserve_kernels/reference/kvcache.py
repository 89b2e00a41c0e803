"""Cache rows: writing them in the native formats and reading them back (model.md section 11).

A pool is a uint8 tensor [rows, row_bytes]: the codes of a row, directly followed by its scales. Row indices of -1
mean "none": they are not written, and read as zeros whatever the pool holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.quant import (
    dequantize_fp4_index,
    dequantize_fp4_main,
    dequantize_fp8,
    quantize_fp4_index,
    quantize_fp4_main,
    quantize_fp8,
)
from dsserve_kernels.registry import reference


def _store(pool: Tensor, index: Tensor, codes: Tensor, scales: Tensor) -> None:
    kept = index >= 0
    pool[index[kept]] = torch.cat((codes, scales), dim=-1)[kept]


def _load(pool: Tensor, index: Tensor) -> Tensor:
    """Raw rows at `index` [..], zero bytes where it is -1 (stale storage is never multiplied)."""
    rows = pool[index.clamp_min(0)]
    return rows.masked_fill_((index < 0).unsqueeze(-1), 0)


@reference("store_window_rows")
def store_window_rows(pool: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Write window rows [T, d] (528 bytes at d = 512); `index` [T] int64. Returns the rows as they read back."""
    codes, scales = quantize_fp8(rows)
    _store(pool, index, codes.view(torch.uint8), scales)
    return dequantize_fp8(codes, scales).to(rows.dtype)


@reference("load_window_rows")
def load_window_rows(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of window rows: [..] -> [.., d]."""
    raw = _load(pool, index)
    dim = raw.shape[-1] * 32 // 33
    codes = raw[..., :dim].contiguous().view(torch.float8_e4m3fn)
    return dequantize_fp8(codes, raw[..., dim:]).to(dtype)


@reference("store_main_rows")
def store_main_rows(pool: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write compressed rows [T, d] (288 bytes at d = 512)."""
    _store(pool, index, *quantize_fp4_main(rows))


@reference("load_main_rows")
def load_main_rows(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of compressed rows: [..] -> [.., d]."""
    raw = _load(pool, index)
    packed = raw.shape[-1] * 8 // 9
    return dequantize_fp4_main(raw[..., :packed], raw[..., packed:], dtype)


@reference("store_index_rows")
def store_index_rows(pool: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write index keys [T, di] (68 bytes at di = 128)."""
    _store(pool, index, *quantize_fp4_index(rows))


@reference("load_index_rows")
def load_index_rows(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of index keys: [..] -> [.., di]."""
    raw = _load(pool, index)
    packed = raw.shape[-1] * 16 // 17
    return dequantize_fp4_index(raw[..., :packed], raw[..., packed:], dtype)
