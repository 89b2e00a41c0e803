"""Sparse attention of few rows: masks and bookkeeping in numpy, products and exponentials as in the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import register, rounded
from dsserve_kernels.kvcache.numpy_rows import load_main_rows
from dsserve_kernels.reference import attention as reference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


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
    wide = window_rows.double().numpy()
    sink64 = sink.double().numpy()[:, None]
    parts = []
    for start in range(0, rows, block):
        part = slice(start, start + block)
        chosen = None if main_index is None else main_index[part]
        keys, missing = _keys(wide, window_index[part], main_pool, chosen)
        parts.append(_attend(q[part], keys, missing, sink64, scale, round_weights))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _keys(
    window_rows: NDArray[np.float64],
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Keys [t, K, d] of each row and which are none [t, K]."""
    index = window_index.numpy()
    missing = index < 0
    if main_pool is None or main_index is None:
        keys = window_rows.take(index, 0, mode="clip")
        window_keys = keys
    else:
        width, chosen = index.shape[1], main_index.numpy()
        keys = np.empty((len(index), width + chosen.shape[1], window_rows.shape[1]))
        window_keys = keys[:, :width]
        window_keys[...] = window_rows.take(index, 0, mode="clip")
        keys[:, width:] = load_main_rows(main_pool, main_index, torch.float32).numpy()
        missing = np.concatenate((missing, chosen < 0), 1)
    absent = missing[:, : index.shape[1]]
    if absent.any():
        window_keys[absent] = 0
    return keys, missing


def _attend(
    q: Tensor,
    keys: NDArray[np.float64],
    missing: NDArray[np.bool_],
    sink: NDArray[np.float64],
    scale: float,
    round_weights: bool,
) -> Tensor:
    """One block: q [t, H, d], keys [t, K, d], missing [t, K], sink [H, 1]."""
    values = torch.from_numpy(keys)
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
    out = torch.bmm(weights, values).numpy()
    np.divide(out, total, out)
    return rounded(out, q.dtype)


register(sparse_attention)
