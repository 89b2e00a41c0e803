"""Attention of a block of rows over the union of their key sets: two plain matrix products, foreign keys masked.

Neighbours in a prompt see almost the same window and choose many of the same compressed rows (tiny preset, 32 rows of
192 keys: 150 to 650 distinct keys), so that a product with keys which a row does not have costs less than a copy of
the keys it has. A foreign key has a weight of zero; adding zeros is exact, so the result is that of the row's own keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.arrays import Float64

#: Queries from which shared keys are worth finding.
MIN_ROWS = 16
#: Heads whose products with a key cost as much as copying it (measured at 512 columns).
_COPY_HEADS = 24


class SharedKeys:
    """The key rows of one call, and the unions that blocks of its queries read."""

    def __init__(self, table: Float64, *, num_heads: int) -> None:
        """`table` is [R, d]; its last row is zeros and stands for "none"."""
        self._table = table
        self._num_heads = num_heads
        # Sums of finite numbers of BF16's range are finite in float64.
        self._is_finite = np.isfinite(np.add.reduce(table, 1))
        self._place = np.empty(len(table), dtype=np.int64)

    def union(self, index: NDArray[np.int64]) -> tuple[Float64, Float64] | None:
        """Keys [U, d] that rows read, and per row 0 for its own keys, -inf for the others [t, U].

        Args:
            index: [t, K] rows of the table, the last row = none; otherwise distinct within a row.

        Returns:
            None if the rows have too few keys in common, or if a key is not finite: that one is for the rows that
            have it, while a weight of zero would hand it to all.
        """
        rows, num_keys = index.shape
        is_read = np.zeros(len(self._table), dtype=np.bool_)
        is_read[index] = True
        is_read[-1] = True
        chosen = np.flatnonzero(is_read)
        heads = self._num_heads
        if len(chosen) * heads > num_keys * (2 * heads + _COPY_HEADS):
            return None
        if not self._is_finite[chosen].all():
            return None
        self._place[chosen] = np.arange(len(chosen))
        bias = np.full((rows, len(chosen)), -np.inf)
        bias[np.arange(rows)[:, None], self._place[index]] = 0
        bias[:, -1] = -np.inf
        return self._table[chosen], bias


def weighted_values(
    q: Tensor,
    keys: Float64,
    bias: Float64,
    sink: Float64,
    *,
    scale: float,
    round_weights: bool,
) -> Float64:
    """Attention of q [t, H, d] float64 over keys [U, d] with bias [t, U]; sink [H, 1] -> [t, H, d].

    The arithmetic is that of `reference.attention`.
    """
    rows, heads, dim = q.shape
    values = torch.from_numpy(keys)
    products = torch.mm(q.view(rows * heads, dim), values.mT)
    scores = products.numpy().reshape(rows, heads, -1)
    np.multiply(scores, scale, scores)
    np.add(scores, bias[:, None], scores)
    top = np.maximum.reduce(scores, -1, keepdims=True)
    top[np.isneginf(top)] = 0
    np.subtract(scores, top, scores)
    weights = products.exp_()
    total = weights.sum(-1).numpy().reshape(rows, heads, 1)
    total += torch.from_numpy(sink - top).exp_().numpy()
    if round_weights:
        weights = weights.to(torch.bfloat16).double()
    out: Float64 = torch.mm(weights, values).numpy().reshape(rows, heads, dim)
    np.divide(out, total, out)
    return out
