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
    rows = q.shape[0]
    if rows == 0:
        return torch.empty_like(q)
    sink64 = sink.double().numpy()[:, None]
    if rows < MIN_ROWS:
        keys, missing = _gathered(window_rows, window_index, main_pool, main_index)
        out = _own_keys(q, keys, missing, sink64, scale, round_weights)
        return rounded(out, q.dtype)
    table, index = _table(window_rows, window_index, main_pool, main_index)
    shared = SharedKeys(table, num_heads=q.shape[1])
    parts = []
    for start in range(0, rows, reference.ROW_BLOCK):
        part = slice(start, start + reference.ROW_BLOCK)
        union = shared.union(index[part])
        if union is not None:
            out = weighted_values(
                q[part].double(), *union, sink64, scale=scale, round_weights=round_weights
            )
        else:
            missing = index[part] == len(table) - 1
            keys = torch.from_numpy(table.take(index[part], 0))
            out = _own_keys(q[part], keys, missing, sink64, scale, round_weights)
        parts.append(rounded(out, q.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gathered(
    window_rows: Tensor, window_index: Tensor, main_pool: Tensor | None, main_index: Tensor | None
) -> tuple[Tensor, NDArray[np.bool_]]:
    """The keys of each query [T, K, d], zeros for "none", and where that is [T, K].

    Zeros, because a NaN of another request would get through a weight of zero.
    """
    (rows, window), dim = window_index.shape, window_rows.shape[1]
    num_main = 0 if main_index is None else main_index.shape[1]
    keys = torch.empty(rows, window + num_main, dim, dtype=torch.float64)
    missing = window_index.numpy() < 0
    chosen = window_rows.index_select(0, window_index.clamp_min(0).view(-1))
    keys[:, :window] = chosen.view(rows, window, dim)
    if missing.any():
        keys.numpy()[:, :window][missing] = 0
    if main_pool is not None and main_index is not None:
        keys[:, window:] = load_main_rows(main_pool, main_index, torch.float32)
        missing = np.concatenate((missing, main_index.numpy() < 0), 1)
    return keys, missing


def _table(
    window_rows: Tensor, window_index: Tensor, main_pool: Tensor | None, main_index: Tensor | None
) -> tuple[Float64, NDArray[np.int64]]:
    """All rows that a call reads [R, d], the last one zeros for "none", and the rows [T, K] of each query."""
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
    """Rows to read, each once for all queries, and the place of each entry among them (-1 = none)."""
    is_read = np.zeros(pool_rows + 1, dtype=np.bool_)
    is_read[index] = True  # -1 marks the entry behind the pool
    is_read[-1] = False
    place = np.cumsum(is_read) - 1
    place[-1] = -1
    return np.flatnonzero(is_read), place[index]


def _own_keys(
    q: Tensor,
    keys: Tensor,
    missing: NDArray[np.bool_],
    sink: Float64,
    scale: float,
    round_weights: bool,
) -> Float64:
    """Rows that each read their own keys: q [t, H, d], keys [t, K, d], missing [t, K], sink [H, 1] -> [t, H, d]."""
    products = torch.bmm(q.double(), keys.transpose(1, 2))
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
    out: Float64 = torch.bmm(weights, keys).numpy()
    np.divide(out, total, out)
    return out


register(sparse_attention)
