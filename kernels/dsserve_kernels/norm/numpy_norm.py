"""RMSNorm and rotary embedding of few rows with numpy, bit-equal to the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import is_small, mean_square, register, rounded
from dsserve_kernels.reference import norm as reference

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.norm.rms_norm`."""
    if not is_small(x):
        return reference.rms_norm(x, weight, eps)
    wide = x.float()
    inverse = 1 / np.sqrt(mean_square(wide) + np.float32(eps))
    result = wide.numpy() * inverse
    np.multiply(weight.numpy(), result, result)
    return rounded(result, x.dtype)


def rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """See `reference.norm.rope`."""
    if not is_small(x):
        return reference.rope(x, cos_sin, inverse=inverse)
    table = cos_sin.numpy()
    turned = table.shape[1] * 2
    out = (x.clone() if x.dtype == torch.float32 else x.float()).numpy()
    shape = (table.shape[0],) + (1,) * (x.dim() - 2) + (table.shape[1],)
    cos, sin = table[..., 0].reshape(shape), table[..., 1].reshape(shape)
    if inverse:
        sin = -sin
    pairs = out[..., -turned:]
    real, imaginary = pairs[..., 0::2], pairs[..., 1::2]
    new_real = real * cos - imaginary * sin
    new_imaginary = real * sin + imaginary * cos
    real[...] = new_real
    imaginary[...] = new_imaginary
    return rounded(out, x.dtype)


register(rms_norm, ("released", "fast"))
register(rope, ("released", "fast"))
