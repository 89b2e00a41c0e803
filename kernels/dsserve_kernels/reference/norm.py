"""RMSNorm and rotary embedding (model.md section 2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsserve_kernels.reference.math import mean_square
from dsserve_kernels.registry import reference


@reference("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with one rounding at the end: [.., n] in the dtype of `x`; `weight` [n] float32."""
    wide = x.float()
    return (weight * (wide * torch.rsqrt(mean_square(wide) + eps))).to(x.dtype)


def rope_frequencies(dim: int, theta: float) -> Tensor:
    """Base frequencies [dim / 2], float32, as 1 / theta^(2i / dim)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def yarn_frequencies(
    dim: int,
    theta: float,
    *,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_length: int,
) -> Tensor:
    """YaRN frequencies [dim / 2] of the compressed layers; no mscale anywhere."""

    def corrected(rotations: float) -> float:
        return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    base = rope_frequencies(dim, theta)
    low = max(math.floor(corrected(beta_fast)), 0)
    high = min(math.ceil(corrected(beta_slow)), dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / factor * ramp + base * (1 - ramp)


def rope_table(frequencies: Tensor, length: int) -> Tensor:
    """Cos and sin of every position: [length, dim / 2, 2] float32."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.view_as_real(torch.polar(torch.ones_like(angles), angles))


@reference("rope")
def rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last features of each row; adjacent pairs are complex numbers.

    Args:
        x: [T, .., n] activation.
        cos_sin: [T, r / 2, 2] float32, the table's rows at each row's position; the last r of n are rotated.
        inverse: Multiply by the conjugate.

    Returns:
        A new tensor like `x`.
    """
    rotated = cos_sin.shape[1] * 2
    shape = (cos_sin.shape[0],) + (1,) * (x.dim() - 2) + (cos_sin.shape[1],)
    turn = torch.view_as_complex(cos_sin).view(shape)
    pairs = x[..., -rotated:].float().view(*x.shape[:-1], rotated // 2, 2)
    result = torch.view_as_complex(pairs) * (turn.conj() if inverse else turn)
    out = x.clone()
    out[..., -rotated:] = torch.view_as_real(result).flatten(-2)
    return out
