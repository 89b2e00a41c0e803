"""Residual streams into a sublayer, few rows with numpy, bit-equal to the chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import in_lanes, register
from dsserve_kernels.fused import chains
from dsserve_kernels.fused.values import (
    inverse_root_mean_square,
    is_few,
    is_wide,
    norm,
    round_bf16,
    times,
    to_bf16,
    to_float32,
)
from dsserve_kernels.mhc.numpy_sinkhorn import sinkhorn

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve_kernels.arrays import Float32
    from dsserve_kernels.fused.weights import SublayerInput
    from dsserve_kernels.select import Operators


class _Arrays:
    """`SublayerInput` as arrays."""

    def __init__(self, weights: SublayerInput) -> None:
        n = weights.num_streams
        self.norm, self.norm_eps = weights.norm.numpy(), np.float32(weights.norm_eps)
        self.fn = weights.fn.numpy().T
        self.stat_eps, self.eps = np.float32(weights.stat_eps), np.float32(weights.eps)
        self.factors = np.repeat(weights.scale.numpy(), (n, n, n * n))
        self.base = weights.base.numpy()
        self.num_streams, self.rounds = n, weights.rounds

    def split(self, z: Float32) -> tuple[Float32, Float32, Float32]:
        """As `hc_split_sinkhorn`; `z` is overwritten."""
        n = self.num_streams
        np.multiply(z, self.factors, z)
        np.add(z, self.base, z)
        gates = in_lanes(torch.sigmoid, z[:, : 2 * n])
        logits = torch.from_numpy(z[:, 2 * n :].copy()).view(-1, n, n)
        comb: Float32 = logits.softmax(-1).numpy()
        np.add(comb, self.eps, comb)
        return (
            gates[:, :n] + self.eps,
            gates[:, n:] * np.float32(2),
            sinkhorn(comb, self.rounds, self.eps),
        )


def sublayer_input(
    ops: Operators, streams: Tensor, pre: Tensor, weights: SublayerInput
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `chains.sublayer_input`."""
    if not is_few(streams) or not is_wide(weights.fn):
        return chains.sublayer_input(ops, streams, pre, weights)
    arrays: _Arrays | None = weights.prepared
    if arrays is None:
        arrays = weights.prepared = _Arrays(weights)
    wide = to_float32(streams)
    flat = wide.reshape(len(wide), -1)
    # Sums over a dimension that is not the last run from its first to its last entry.
    collapsed = np.add.reduce(wide * pre.numpy()[:, :, None], 1)
    x = norm(round_bf16(collapsed), arrays.norm, arrays.norm_eps)
    z = times(flat.astype(np.float64), arrays.fn)
    np.multiply(z, inverse_root_mean_square(flat, arrays.stat_eps), z)
    next_pre, post, comb = arrays.split(z)
    return to_bf16(x), torch.from_numpy(next_pre), torch.from_numpy(post), torch.from_numpy(comb)


register(sublayer_input, ("released",))
