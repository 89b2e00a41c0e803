"""FP8 linears on the CPU: the quantiser in numpy, the product in torch, some rows at a time; bit-equal to the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsserve_kernels.arrays import register, row_blocks, widened
from dsserve_kernels.quant.numpy_fp8 import round_fp8_array
from dsserve_kernels.reference import gemm as reference

if TYPE_CHECKING:
    from torch import Tensor


def linear_fp8(x: Tensor, weight: Tensor, *, quantize: bool) -> Tensor:
    """See `reference.gemm.linear_fp8`."""
    if not quantize or x.dim() != 2 or x.numel() == 0:
        return reference.linear_fp8(x, weight, quantize=quantize)
    transposed = weight.double().mT
    # A product is written once and read once: four times the room of the quantiser's many temporaries.
    blocks = row_blocks(x.shape[0], max(x.shape[1], weight.shape[0] // 4))
    if len(blocks) == 1:
        return torch.mm(_rounded(x), transposed).to(x.dtype)
    out = x.new_empty(x.shape[0], weight.shape[0])
    for block in blocks:
        out[block] = torch.mm(_rounded(x[block]), transposed)
    return out


def _rounded(x: Tensor) -> Tensor:
    return torch.from_numpy(round_fp8_array(widened(x)))


register(linear_fp8)
