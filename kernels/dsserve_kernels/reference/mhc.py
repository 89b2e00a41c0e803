"""Single-pass manifold-constrained hyper-connections (model.md section 4)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsserve_kernels.reference.math import matmul, mean_square, sigmoid
from dsserve_kernels.registry import reference


@reference("hc_stats")
def hc_stats(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Projection of the flattened streams, divided by their root mean square.

    Args:
        streams: [T, n, D] residual streams.
        fn: [n * (n + 2), n * D].
        eps: Added to the mean of squares.

    Returns:
        z [T, n * (n + 2)] float32.
    """
    flat = streams.flatten(1).float()
    return matmul(flat, fn, torch.float32) * torch.rsqrt(mean_square(flat) + eps)


@reference("hc_split_sinkhorn")
def hc_split_sinkhorn(
    z: Tensor, base: Tensor, scale: Tensor, *, num_streams: int, rounds: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates and the doubly-stochastic mixing matrix.

    Args:
        z: [T, n * (n + 2)] float32 from `hc_stats`.
        base: [n * (n + 2)] float32.
        scale: [3] float32.
        num_streams: n.
        rounds: Sinkhorn rounds (`hc_sinkhorn_iters`).
        eps: `hc_eps`.

    Returns:
        pre [T, n], post [T, n], comb [T, n, n] (index i = input stream, j = output stream), float32.
    """
    n = num_streams
    scaled = scaled_mixes(z, base, scale, n)
    gates = sigmoid(scaled[:, : 2 * n])
    comb = scaled[:, 2 * n :].view(-1, n, n).softmax(-1) + eps
    total = comb.sum(1, keepdim=True)
    comb /= total.add_(eps)
    row_total = torch.empty_like(comb[:, :, :1])
    for _ in range(rounds - 1):
        comb /= torch.sum(comb, 2, keepdim=True, out=row_total).add_(eps)
        comb /= torch.sum(comb, 1, keepdim=True, out=total).add_(eps)
    return gates[:, :n] + eps, 2 * gates[:, n:], comb


def scaled_mixes(z: Tensor, base: Tensor, scale: Tensor, num_streams: int) -> Tensor:
    """Scales z: times the scale of each column's kind (pre, post, matrix), plus base: [T, n * (n + 2)]."""
    return z * scale[_scale_index(num_streams, z.device)] + base


@cache
def _scale_index(num_streams: int, device: torch.device) -> Tensor:
    """Which of the three scales each of the n * (n + 2) columns takes."""
    column = torch.arange(num_streams * (num_streams + 2), device=device)
    return (column >= num_streams).long() + (column >= 2 * num_streams).long()


@reference("hc_collapse")
def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams: [T, n, D], [T, n] -> [T, D], rounded once."""
    return (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


@reference("hc_expand")
def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams after a sublayer: R'_j = post_j * y + sum_i comb[i, j] * R_i, the sum over i first.

    Args:
        y: [T, D] output of the sublayer.
        streams: [T, n, D] streams before it.
        post: [T, n] float32.
        comb: [T, n, n] float32.
    """
    mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(streams.dtype)
