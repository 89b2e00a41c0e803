"""Engram: n-gram row ids, table look-up and gate (model.md section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.math import sigmoid
from dsserve_kernels.reference.quant import dequantize_fp8
from dsserve_kernels.registry import reference

#: Constants of section 7.3: floor of |dot| under the square root, and of the statistics.
DOT_FLOOR = 1e-6
STAT_EPS = 1e-20


@reference("engram_hash")
def engram_hash(
    history: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """Table rows of each token's n-grams.

    Args:
        history: [T, N] int64 ids of p, p-1, .., p-N+1; -1 = blocked (before the start, or behind an image).
        token_map: [V] int64, compressed vocabulary.
        multipliers: [L, N] int64 of each Engram layer.
        primes: [L, N - 1, h] int64.
        offsets: [L, (N - 1) * h] int64.
        pad_id: Raw id that replaces blocked tokens.

    Returns:
        [T, L, (N - 1) * h] int64.
    """
    blocked = (history < 0).cumsum(1) > 0
    mapped = token_map[torch.where(blocked, pad_id, history)]
    products = mapped.unsqueeze(1) * multipliers.unsqueeze(0)
    mixed = products[..., 0]
    columns = []
    for n in range(1, history.shape[1]):
        mixed = mixed ^ products[..., n]
        columns.append(mixed.unsqueeze(-1) % primes[:, n - 1].unsqueeze(0))
    return torch.cat(columns, dim=-1) + offsets


@reference("engram_gather")
def engram_gather(codes: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of table rows: codes [N, De] E4M3, scales [N, De / 32] UE8M0, rows [T, c] -> [T, c * De]."""
    picked = codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    return dequantize_fp8(picked, scales[rows]).flatten(1).to(dtype)


@reference("engram_gate")
def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, image_mask: Tensor | None
) -> Tensor:
    """Add the gated value to every residual stream.

    Args:
        streams: [T, n, D].
        kv: [T, (n + 1) * D] output of the Engram's linear: n keys, then the value.
        q_weight: [n, D] float32.
        k_weight: [n, D] float32.
        image_mask: [T] bool, rows that pass through unchanged, or None.
    """
    rows, n, dim = streams.shape
    wide = streams.float()
    keys = kv[:, : n * dim].view(rows, n, dim).float()
    value = kv[:, n * dim :].float()
    # This order of factors is that of the golden data, where gates of exactly 1/3 make BF16 ties.
    dot = (
        (wide * (q_weight * k_weight) * keys).sum(-1)
        * (_inverse_rms(wide) * _inverse_rms(keys))
        * dim**-0.5
    )
    root = dot.abs().clamp_min(DOT_FLOOR).sqrt()
    gate = sigmoid(torch.copysign(root, dot))
    if image_mask is not None:
        gate = gate.masked_fill(image_mask.unsqueeze(1), 0.0)
    return (wide + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1) + STAT_EPS)
