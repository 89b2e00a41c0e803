"""Sparse attention on the CPU: masks and bookkeeping in numpy, products and exponentials as in the reference.

Few rows read their own keys, as the reference does. Many rows of one prompt have most keys in common: `shared_keys`
takes those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import register, rounded
from dsserve_kernels.attention.shared_keys import MIN_ROWS, SharedKeys, weighted_values
from dsserve_kernels.kvcache.numpy_rows import load_main_rows
from dsserve_kernels.reference import attention as reference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.arrays import Float64


def sparse_attention(
    q: Tensor,
    window_rows: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    *,
    scale: float,
    round_weights: bool,
) -> Tensor:
    """See `reference.attention.sparse_attention`."""
    rows, block = q.shape[0], reference.ROW_BLOCK
    if rows == 0:
        return torch.empty_like(q)
    table, index = _table(window_rows, window_index, main_pool, main_index)
    shared = SharedKeys(table, num_heads=q.shape[1]) if rows >= MIN_ROWS else None
    sink64 = sink.double().numpy()[:, None]
    parts = []
    for start in range(0, rows, block):
        part = slice(start, start + block)
        union = None if shared is None else shared.union(index[part])
        if union is not None:
            keys, bias = union
            out = weighted_values(
                q[part].double(), keys, bias, sink64, scale=scale, round_weights=round_weights
            )
        else:
            out = _own_keys(q[part], table, index[part], sink64, scale, round_weights)
        parts.append(rounded(out, q.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _table(
    window_rows: Tensor, window_index: Tensor, main_pool: Tensor | None, main_index: Tensor | None
) -> tuple[Float64, NDArray[np.int64]]:
    """All rows that a call reads [R, d], the last one zeros, and the rows [T, K] that each query attends to.

    Zeros stand for "none": a NaN of another request would get through a weight of zero.
    """
    window, dim = window_rows.shape
    index = window_index.numpy()
    if main_pool is None or main_index is None:
        table = np.empty((window + 1, dim))
        index = np.where(index < 0, window, index)
    else:
        chosen, place = _distinct(main_index.numpy(), main_pool.shape[0])
        table = np.empty((window + len(chosen) + 1, dim))
        table[window:-1] = load_main_rows(
            main_pool, torch.from_numpy(chosen), torch.float32
        ).numpy()
        last = len(table) - 1
        index = np.concatenate(
            (np.where(index < 0, last, index), np.where(place < 0, last, place + window)), 1
        )
    table[:window] = window_rows.float().numpy()
    table[-1] = 0
    return table, index


def _distinct(
    index: NDArray[np.int64], pool_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to read, and the place of each entry among them (-1 = none); a long call reads a row once for all."""
    if index.shape[0] < MIN_ROWS:
        flat = np.maximum(index, 0).reshape(-1)
        return flat, np.where(index < 0, -1, np.arange(flat.size).reshape(index.shape))
    is_read = np.zeros(pool_rows + 1, dtype=np.bool_)
    is_read[index] = True  # -1 marks the entry behind the pool
    is_read[-1] = False
    place = np.cumsum(is_read) - 1
    place[-1] = -1
    return np.flatnonzero(is_read), place[index]


def _own_keys(
    q: Tensor,
    table: Float64,
    index: NDArray[np.int64],
    sink: Float64,
    scale: float,
    round_weights: bool,
) -> Float64:
    """One block whose rows each read their own keys: q [t, H, d], index [t, K], sink [H, 1] -> [t, H, d]."""
    values = torch.from_numpy(table.take(index, 0))
    missing = index == len(table) - 1
    products = torch.bmm(q.double(), values.transpose(1, 2))
    scores = products.numpy()
    np.multiply(scores, scale, scores)
    if missing.any():
        np.copyto(scores, -np.inf, where=missing[:, None])
    top = np.maximum.reduce(scores, -1, keepdims=True)
    if missing.all(1).any():
        top[np.isneginf(top)] = 0
    np.subtract(scores, top, scores)
    weights = products.exp_()
    total = weights.sum(-1, keepdim=True).numpy() + torch.from_numpy(sink - top).exp_().numpy()
    if round_weights:
        weights = weights.to(torch.bfloat16).double()
    out: Float64 = torch.bmm(weights, values).numpy()
    np.divide(out, total, out)
    return out


register(sparse_attention)
