"""mHC statistics and stream updates on the CPU, few rows with numpy, bit-equal to the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import is_small, mean_square, register, rounded, widened
from dsserve_kernels.mhc import stream_blocks
from dsserve_kernels.reference import mhc as reference

if TYPE_CHECKING:
    from torch import Tensor


def hc_stats(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """See `reference.mhc.hc_stats`."""
    if not is_small(streams):
        return reference.hc_stats(streams, fn, eps)
    flat = streams.flatten(1).float()
    mixes = torch.mm(flat.double(), fn.double().mT).float()
    values = mixes.numpy()
    np.multiply(values, 1 / np.sqrt(mean_square(flat) + np.float32(eps)), values)
    return mixes


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """See `reference.mhc.hc_collapse`."""
    if not is_small(streams):
        return stream_blocks.hc_collapse(streams, pre)
    weighted = widened(streams) * pre.numpy()[:, :, None]
    # Sums over a dimension that is not the last run from its first to its last entry.
    return rounded(np.add.reduce(weighted, 1), streams.dtype)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `reference.mhc.hc_expand`."""
    if not is_small(streams):
        return stream_blocks.hc_expand(y, streams, post, comb)
    mixed = np.add.reduce(widened(streams)[:, :, None] * comb.numpy()[..., None], 1)
    result = post.numpy()[:, :, None] * widened(y)[:, None]
    np.add(result, mixed, result)
    return rounded(result, streams.dtype)


register(hc_stats, ("released", "fast"))
register(hc_collapse)
register(hc_expand)
