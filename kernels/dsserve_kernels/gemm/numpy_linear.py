"""FP8 linears of few rows: the quantiser in numpy, the product in torch; bit-equal to the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsserve_kernels.arrays import is_small, register, widened
from dsserve_kernels.quant.numpy_fp8 import round_fp8_array
from dsserve_kernels.reference import gemm as reference

if TYPE_CHECKING:
    from torch import Tensor


def linear_fp8(x: Tensor, weight: Tensor, *, quantize: bool) -> Tensor:
    """See `reference.gemm.linear_fp8`."""
    if not quantize or x.dim() != 2 or not is_small(x):
        return reference.linear_fp8(x, weight, quantize=quantize)
    inputs = torch.from_numpy(round_fp8_array(widened(x)))
    return torch.mm(inputs, weight.double().mT).to(x.dtype)


register(linear_fp8)
