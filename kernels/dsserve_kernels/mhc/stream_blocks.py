"""mHC stream updates of many rows, some at a time: products and sums in place on what fits the cache.

The sums run from the first to the last stream, as those of the reference do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsserve_kernels.arrays import row_blocks

if TYPE_CHECKING:
    from torch import Tensor


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """See `reference.mhc.hc_collapse`."""
    rows, num_streams, dim = streams.shape
    out = streams.new_empty(rows, dim)
    for block in row_blocks(rows, num_streams * dim):
        weighted = streams[block].float() * pre[block].unsqueeze(-1)
        total = weighted[:, 0]
        for stream in range(1, num_streams):
            total += weighted[:, stream]
        out[block] = total
    return out


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `reference.mhc.hc_expand`."""
    rows, num_streams, dim = streams.shape
    out = torch.empty_like(streams)
    for block in row_blocks(rows, num_streams * dim):
        wide, factors = streams[block].float(), comb[block].unsqueeze(-1)
        mixed = wide[:, :1] * factors[:, 0]
        product = torch.empty_like(mixed)
        for stream in range(1, num_streams):
            torch.mul(wide[:, stream : stream + 1], factors[:, stream], out=product)
            mixed += product
        torch.mul(y[block].float().unsqueeze(1), post[block].unsqueeze(-1), out=product)
        out[block] = product.add_(mixed)
    return out
