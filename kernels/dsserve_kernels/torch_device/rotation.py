"""Rotary embedding in real arithmetic: CUDA's complex product fuses a multiplication with the addition."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.torch_device.register import register


def rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """See `reference.norm.rope`."""
    rotated = cos_sin.shape[1] * 2
    shape = (cos_sin.shape[0],) + (1,) * (x.dim() - 2) + (cos_sin.shape[1],)
    cos, sin = cos_sin[..., 0].view(shape), cos_sin[..., 1].view(shape)
    if inverse:
        sin = -sin
    first, second = x[..., -rotated:].float().unflatten(-1, (rotated // 2, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return torch.cat((x[..., :-rotated], turned.flatten(-2).to(x.dtype)), dim=-1)


register(rope, ("released", "fast"))
