"""Rounding with straight-through gradients: weights to FP8 and FP4, activations and cache rows to their formats.

Forward values are exactly those of the checkpoint's and the cache's number formats (model.md section 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def pow2_ceil(x: Tensor) -> Tensor:
    """The next power of two at or above each positive normal float32."""
    return ((x.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def _round_e2m1(values: Tensor) -> Tensor:
    """Values up to 6 in magnitude to E2M1: nearest, ties to the even code."""
    power = (values.view(torch.int32) & 0x7F800000).clamp_min(127 << 23).view(torch.float32)
    return (values * 2 / power).round() * (power * 0.5)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def weight_fp8(x: Tensor) -> Tensor:
    """[n, R, C] float32 -> values of E4M3 with one power-of-two scale per 32x32 tile."""
    n, rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % 32, 0, -rows % 32))
    tiles = padded.view(n, padded.shape[1] // 32, 32, padded.shape[2] // 32, 32)
    amax = tiles.abs().amax((2, 4), keepdim=True)
    scale = torch.where(amax > 0, pow2_ceil(amax / E4M3_MAX), 1.0)
    return (_e4m3(tiles / scale) * scale).reshape(padded.shape)[:, :rows, :columns]


def weight_rows_fp8(x: Tensor) -> Tensor:
    """[.., 32 k] -> E4M3 with one scale per row and 32 columns (Engram tables)."""
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, pow2_ceil(amax / E4M3_MAX), 1.0)
    return (_e4m3(blocks / scale) * scale).reshape(x.shape)


def weight_fp4(x: Tensor) -> Tensor:
    """[.., 32 k] -> E2M1 with one power-of-two scale per row and 32 inputs (routed experts)."""
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, pow2_ceil(amax / E2M1_MAX), 1.0)
    values = (blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)
    return (_round_e2m1(values) * scale).reshape(x.shape)


def fp8_rows(x: Tensor) -> Tensor:
    """`Q8` per 32 columns, in the dtype of x."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = pow2_ceil(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1.0 / E4M3_MAX))
    return (_e4m3(blocks / scale) * scale).reshape(x.shape).to(x.dtype)


def fp4_index(x: Tensor) -> Tensor:
    """`Q4i` per 32 columns."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = pow2_ceil(
        blocks.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) * (1.0 / E2M1_MAX)
    )
    return _scaled_e2m1(blocks, scale, x)


def fp4_main(x: Tensor) -> Tensor:
    """`Q4k` per 16 columns with E4M3 scales."""
    blocks = x.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return _scaled_e2m1(blocks, scale, x)


def _scaled_e2m1(blocks: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    codes = _round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX))
    return (codes * scale).reshape(like.shape).to(like.dtype)


class _StraightThrough(torch.autograd.Function):
    """Forward rounds, backward passes the gradient on."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def straight_through(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(x)` with the gradient of the identity."""
    result: Tensor = _StraightThrough.apply(x, function)
    return result
