"""Index scores, top-k selection and candidate blocks (model.md sections 6.2 and 6.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.registry import reference

#: Rows scored at once: bounds the memory of the per-head scores.
ROW_BLOCK = 64


@reference("index_scores")
def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, row_request: Tensor, num_visible: Tensor
) -> Tensor:
    """I[t, j] = sum over heads of w[t, h] * relu(q[t, h] . k[j]), -inf for rows that are not visible.

    Args:
        q: [T, Hi, di] index queries after RoPE and `Q4i`.
        weights: [T, Hi] float32, already scaled.
        keys: [B, N, di] index keys of each request.
        row_request: [T] int64, the request of each row.
        num_visible: [T] int64, rows a query may see.

    Returns:
        [T, N] float32.
    """
    num_keys = keys.shape[1]
    scores = torch.empty(q.shape[0], num_keys, dtype=torch.float32, device=q.device)
    keys64 = keys.double().transpose(1, 2)
    for start in range(0, q.shape[0], ROW_BLOCK):
        block = slice(start, start + ROW_BLOCK)
        dots = torch.matmul(q[block].double(), _rows_of(keys64, row_request[block]))
        summed = torch.bmm(weights[block].double().unsqueeze(1), dots.relu_()).squeeze(1)
        scores[block] = summed.float()
    hidden = torch.arange(num_keys, device=q.device) >= num_visible.unsqueeze(1)
    return scores.masked_fill_(hidden, -torch.inf)


def _rows_of(keys: Tensor, row_request: Tensor) -> Tensor:
    """Keys of each row's request; one request needs no copy."""
    return keys if keys.shape[0] == 1 else keys[row_request]


@reference("topk_rows")
def topk_rows(scores: Tensor, k: int) -> Tensor:
    """Positions of the k largest scores of each row, ascending; -1 fills up.

    Ties go to the lower position; -inf is never chosen.

    Args:
        scores: [T, N] float32.
        k: Wanted positions.

    Returns:
        [T, min(k, N)] int64.
    """
    num = scores.shape[1]
    ordered, positions = torch.sort(scores, dim=1, descending=True, stable=True)
    k = min(k, num)
    chosen = torch.where(ordered[:, :k] > -torch.inf, positions[:, :k], num)
    chosen = chosen.sort(dim=1).values
    return torch.where(chosen == num, -1, chosen)


@reference("candidate_mask")
def candidate_mask(
    scores: Tensor, num_visible: Tensor, *, block_size: int, num_blocks: int
) -> Tensor:
    """Positions inside the best blocks; the block of the newest visible position is always kept.

    Args:
        scores: [T, N] float32 of the candidate source, -inf where not visible.
        num_visible: [T] int64.
        block_size: Positions per block.
        num_blocks: Blocks kept.

    Returns:
        [T, N] bool.
    """
    rows, num = scores.shape
    padding = -num % block_size
    padded = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf)
    best = padded.view(rows, padded.shape[1] // block_size, block_size).amax(-1)
    newest = (num_visible - 1).clamp_min(0).div(block_size, rounding_mode="floor").unsqueeze(1)
    forced = torch.zeros_like(best, dtype=torch.bool).scatter_(
        1, newest, num_visible.unsqueeze(1) > 0
    )
    best = torch.where(forced, torch.inf, best)
    kept = topk_rows(best, num_blocks)
    mask = torch.zeros(rows, best.shape[1] + 1, dtype=torch.bool, device=scores.device)
    mask.scatter_(1, torch.where(kept < 0, best.shape[1], kept), True)
    return mask[:, :-1].repeat_interleave(block_size, dim=1)[:, :num]
