"""Index scores and top-k selection on the CPU: nothing is scored that no row sees, nothing sorted that is not chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import register
from dsserve_kernels.reference import indexer as reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor


#: Products of heads and keys computed at once, 2 MiB of float64.
_MAX_DOTS = 1 << 18


def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, row_request: Tensor, num_visible: Tensor
) -> Tensor:
    """See `reference.indexer.index_scores`; the arithmetic is the same."""
    rows, heads, dim = q.shape
    scores = torch.full((rows, keys.shape[1]), -torch.inf)
    visible = num_visible.numpy()
    for request, first, last in _runs(row_request.numpy()):
        longest = int(visible[first:last].max())
        if longest == 0:
            continue
        transposed = keys[request, :longest].double().mT
        step = max(_MAX_DOTS // (heads * longest), 1)
        for start in range(first, last, step):
            block = slice(start, min(start + step, last))
            count, seen = block.stop - start, int(visible[block].max())
            dots = torch.mm(q[block].double().view(count * heads, dim), transposed[:, :seen])
            summed = torch.bmm(
                weights[block].double().unsqueeze(1), dots.relu_().view(count, heads, seen)
            )
            hidden = torch.arange(seen) >= num_visible[block].unsqueeze(1)
            scores[block, :seen] = summed.squeeze(1).float().masked_fill_(hidden, -torch.inf)
    return scores


def _runs(row_request: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """(request, first row, end) of consecutive rows of one request."""
    starts = np.flatnonzero(np.diff(row_request, prepend=-1)).tolist()
    ends = [*starts[1:], len(row_request)]
    return ((int(row_request[start]), start, end) for start, end in zip(starts, ends, strict=False))


def topk_rows(scores: Tensor, k: int) -> Tensor:
    """See `reference.indexer.topk_rows`."""
    rows, num = scores.shape
    if rows == 0 or k >= num:
        return reference.topk_rows(scores, k)
    values = scores.numpy()
    least = np.partition(values, num - k, 1)[:, num - k : num - k + 1]
    chosen = values > least
    missing = k - chosen.sum(1, keepdims=True)
    ties = (values == least) & (least > -np.inf)
    if (ties.sum(1, keepdims=True) > missing).any():
        ties &= ties.cumsum(1) <= missing
    chosen |= ties
    row, position = np.nonzero(chosen)
    if len(row) == rows * k:
        return torch.from_numpy(position.reshape(rows, k))
    counts = chosen.sum(1)
    result = np.full((rows, k), -1, dtype=np.int64)
    result[row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)] = position
    return torch.from_numpy(result)


register(index_scores)
register(topk_rows)
