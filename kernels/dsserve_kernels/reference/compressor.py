"""Compression of token latents into cached rows (model.md section 6.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.registry import reference


@reference("pool_pairs")
def pool_pairs(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Ratio-2 pooling: per channel a softmax over the two tokens' gates weighs their values.

    Args:
        first: [R, 2, d] float32, (u, g) of the even token.
        second: [R, 2, d] float32, (u, g) of the odd token.
        dtype: Result type (one rounding).

    Returns:
        [R, d], before the norm.
    """
    values = torch.stack((first[:, 0], second[:, 0]), dim=1)
    gates = torch.stack((first[:, 1], second[:, 1]), dim=1)
    return (gates.softmax(1) * values).sum(1).to(dtype)
