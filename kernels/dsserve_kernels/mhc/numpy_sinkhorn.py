"""Gates and Sinkhorn rounds of mHC on the CPU with numpy, bit-equal to the reference.

A decode step runs 2 x 20 rounds per layer on a handful of 4x4 matrices, where the cost is that of calling (measured
on 2 cores, one row: 450 us with torch, 80 us here).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import in_lanes, register
from dsserve_kernels.reference import mhc as reference

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve_kernels.arrays import Float32


def hc_split_sinkhorn(
    z: Tensor, base: Tensor, scale: Tensor, *, num_streams: int, rounds: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.mhc.hc_split_sinkhorn`."""
    n = num_streams
    if z.shape[0] == 0:
        return reference.hc_split_sinkhorn(z, base, scale, num_streams=n, rounds=rounds, eps=eps)
    factors = np.repeat(scale.numpy(), (n, n, n * n))
    mixes = z.numpy() * factors + base.numpy()
    gates = in_lanes(torch.sigmoid, mixes[:, : 2 * n])
    logits = torch.from_numpy(np.ascontiguousarray(mixes[:, 2 * n :]))
    comb = logits.view(-1, n, n).softmax(-1).numpy() + np.float32(eps)
    pre, post = gates[:, :n] + np.float32(eps), gates[:, n:] * np.float32(2)
    return (
        torch.from_numpy(pre),
        torch.from_numpy(post),
        torch.from_numpy(sinkhorn(comb, rounds, np.float32(eps))),
    )


def sinkhorn(comb: Float32, rounds: int, eps: np.float32) -> Float32:
    """Columns first, then rows and columns in turn; sums run from the first to the last entry, then add eps.

    Works on two copies, [i, j, T] and [j, i, T]: each half round sums over the leading dimension of one (whose last
    entry is eps) and writes the quotients to the other, which makes it two calls.
    """
    rows, n, _ = comb.shape
    by_input, by_output = _lines(n, rows, eps), _lines(n, rows, eps)
    first, second = by_input[:n].reshape(n, n, rows), by_output[:n].reshape(n, n, rows)
    to_first, to_second = _exchanged(first), _exchanged(second)
    first[...] = comb.transpose(1, 2, 0)
    total = np.empty(n * rows, dtype=np.float32)
    divisor = total.reshape(n, rows)
    add, divide = np.add.reduce, np.divide
    add(by_input, 0, out=total)
    divide(first, divisor, to_second)
    for _ in range(rounds - 1):
        add(by_output, 0, out=total)
        divide(second, divisor, to_first)
        add(by_input, 0, out=total)
        divide(first, divisor, to_second)
    return to_second.transpose(2, 0, 1)


def _lines(n: int, rows: int, eps: np.float32) -> Float32:
    """[n + 1, n * rows] with eps in the last line."""
    lines = np.empty((n + 1, n * rows), dtype=np.float32)
    lines[n] = eps
    return lines


def _exchanged(block: Float32) -> Float32:
    """The block with its first two dimensions exchanged."""
    return block.transpose(1, 0, 2)


register(hc_split_sinkhorn)
