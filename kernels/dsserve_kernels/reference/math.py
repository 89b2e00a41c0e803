"""Sums and transcendental functions whose results do not depend on how many rows a call has.

Matrix products of codes and BF16 numbers are exact or nearly so in float64, so one rounding at the end gives the
same bits in any summation order. Elementwise functions are float32, as in the released code; but torch evaluates the
last elements of a tensor, those that fill no vector register, with scalar functions that differ by an ulp. `sigmoid`,
`silu` and `softplus` are therefore called on whole vector lanes, so that a row's result is not tied to its place in
the batch (kernels.md section 1, rule 6). Measured on torch 2.15, CPU: other functions and sums over a row do not
depend on their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

#: Elements per unrolled vector step, with room to spare (AVX-512: 2 x 16 floats).
LANES = 64


def matmul(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """X [.., k] times weight [n, k] transposed, widened to float64 and rounded once to `dtype`."""
    return (
        torch.mm(x.double(), weight.double().mT).to(dtype)
        if x.dim() == 2
        else (x.double() @ weight.double().mT).to(dtype)
    )


def _in_lanes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise float32 function, evaluated on a whole number of vector lanes."""
    flat = x.reshape(-1)
    missing = -flat.numel() % LANES
    if missing == 0:
        return function(flat).view(x.shape)
    padded = torch.nn.functional.pad(flat, (0, missing))
    return function(padded)[: flat.numel()].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """float32 sigmoid, independent of the place in the batch."""
    return _in_lanes(torch.sigmoid, x)


def softplus(x: Tensor) -> Tensor:
    """float32 softplus, independent of the place in the batch."""
    return _in_lanes(torch.nn.functional.softplus, x)


def silu(x: Tensor) -> Tensor:
    """float32 silu, independent of the place in the batch."""
    return _in_lanes(torch.nn.functional.silu, x)


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares over the last dimension, kept, in float32."""
    return x.square().mean(-1, keepdim=True)
