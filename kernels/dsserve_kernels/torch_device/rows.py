"""Writing cache rows without asking the host which of them are written (model.md section 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.quant import (
    dequantize_fp8,
    quantize_fp4_index,
    quantize_fp4_main,
    quantize_fp8,
)
from dsserve_kernels.torch_device.register import register


def _store(pool: Tensor, index: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the rows whose index is not -1.

    The others write the bytes of the first row that is kept to that row's place once more, so that nothing depends on
    the order of the writes; if no row is kept, they write row 0 of the pool over itself.
    """
    if index.shape[0] == 0:
        return
    kept = index >= 0
    first_kept = kept.int().argmax(0)
    source = torch.where(kept, torch.arange(index.shape[0], device=index.device), first_kept)
    rows = torch.cat((codes, scales), dim=-1)[source]
    pool[index[source].clamp_min(0)] = torch.where(kept.any(), rows, pool[:1])


def store_window_rows(pool: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """See `reference.kvcache.store_window_rows`."""
    codes, scales = quantize_fp8(rows)
    _store(pool, index, codes.view(torch.uint8), scales)
    return dequantize_fp8(codes, scales).to(rows.dtype)


def store_main_rows(pool: Tensor, index: Tensor, rows: Tensor) -> None:
    """See `reference.kvcache.store_main_rows`."""
    _store(pool, index, *quantize_fp4_main(rows))


def store_index_rows(pool: Tensor, index: Tensor, rows: Tensor) -> None:
    """See `reference.kvcache.store_index_rows`."""
    _store(pool, index, *quantize_fp4_index(rows))


register(store_window_rows)
register(store_main_rows)
register(store_index_rows)
