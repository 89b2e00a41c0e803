"""Matrix products: dense FP8, BF16, and products that stay in FP32 (model.md section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.math import matmul
from dsserve_kernels.reference.quant import round_fp8_wide
from dsserve_kernels.registry import reference


@reference("linear_fp8")
def linear_fp8(x: Tensor, weight: Tensor, *, quantize: bool) -> Tensor:
    """Linear whose weight is stored in FP8: the input takes `Q8`, the sum is rounded once to x's dtype.

    Args:
        x: [.., k] activation.
        weight: [n, k] the dequantised weight, in any type that holds every value exactly.
        quantize: Round the input to FP8 per 32 (`--numerics released`).
    """
    return matmul(round_fp8_wide(x, torch.float64) if quantize else x, weight, x.dtype)


@reference("linear")
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Linear whose weight is stored in BF16; rounded once to x's dtype."""
    return matmul(x, weight, x.dtype)


@reference("linear_fp32")
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Product that stays in FP32: router logits, ratio-2 compressor, mHC projection, logits."""
    return matmul(x, weight, torch.float32)


@reference("grouped_linear")
def grouped_linear(o: Tensor, weight: Tensor) -> Tensor:
    """`wo_a`: each group of heads has its own weight.

    Args:
        o: [T, G, c] activation.
        weight: [G, r, c], as in `linear_fp8`.

    Returns:
        [T, G * r] in the dtype of `o`.
    """
    product = torch.bmm(o.double().transpose(0, 1), weight.double().transpose(1, 2))
    return product.transpose(0, 1).flatten(1).to(o.dtype)
