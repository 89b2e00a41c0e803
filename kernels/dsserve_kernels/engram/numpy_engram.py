"""Engram hash, look-up and gate of few rows with numpy, bit-equal to the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import in_lanes, is_small, register, rounded, widened
from dsserve_kernels.kvcache.numpy_rows import E4M3_VALUES, UE8M0_VALUES
from dsserve_kernels.reference import engram as reference

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve_kernels.arrays import Float32

_STAT_EPS, _DOT_FLOOR = np.float32(reference.STAT_EPS), np.float32(reference.DOT_FLOOR)


def engram_hash(
    history: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """See `reference.engram.engram_hash`."""
    if not is_small(history):
        return reference.engram_hash(history, token_map, multipliers, primes, offsets, pad_id)
    ids = history.numpy()
    # A blocked token blocks all before it.
    blocked = np.minimum.accumulate(ids, 1) < 0
    mapped = token_map.numpy().take(np.where(blocked, pad_id, ids))
    products = mapped[:, None] * multipliers.numpy()
    mixed = np.bitwise_xor.accumulate(products, 2)[:, :, 1:]
    columns = mixed[..., None] % primes.numpy()
    return torch.from_numpy(columns.reshape(*columns.shape[:2], -1) + offsets.numpy())


def engram_gather(codes: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.engram.engram_gather`."""
    if not is_small(rows):
        return reference.engram_gather(codes, scales, rows, dtype)
    where = rows.numpy()
    values = E4M3_VALUES.take(codes.view(torch.uint8).numpy().take(where, 0))
    factors = UE8M0_VALUES.take(scales.numpy().take(where, 0))
    groups = values.reshape(*factors.shape, -1)
    np.multiply(groups, factors[..., None], groups)
    return rounded(values.reshape(len(where), -1), dtype)


def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, image_mask: Tensor | None
) -> Tensor:
    """See `reference.engram.engram_gate`."""
    if image_mask is not None or not is_small(streams):
        return reference.engram_gate(streams, kv, q_weight, k_weight, image_mask)
    rows, n, dim = streams.shape
    wide, both = widened(streams), widened(kv)
    keys = both[:, : n * dim].reshape(rows, n, dim)
    dot = wide * (q_weight.numpy() * k_weight.numpy())
    total = _sums(np.multiply(dot, keys, dot))
    total = total * (_inverse_rms(wide) * _inverse_rms(keys)) * np.float32(dim**-0.5)
    # Torch's square root of float32 is not rounded correctly, so no numpy here.
    root = torch.from_numpy(np.maximum(np.abs(total), _DOT_FLOOR)).sqrt_().numpy()
    gate = in_lanes(torch.sigmoid, np.copysign(root, total))
    result = gate[:, :, None] * both[:, None, n * dim :]
    np.add(wide, result, result)
    return rounded(result, streams.dtype)


def _sums(x: Float32) -> Float32:
    """[T, n, D] -> [T, n]; torch sums, in its order."""
    total: Float32 = torch.from_numpy(x).sum(-1).numpy()
    return total


def _inverse_rms(x: Float32) -> Float32:
    inverse: Float32 = np.float32(1) / np.sqrt(_sums(x * x) / np.float32(x.shape[-1]) + _STAT_EPS)
    return inverse


register(engram_hash)
register(engram_gather)
register(engram_gate)
