"""Bodies of `--numerics fp32` that work in float64 and round once: norms, rotation, mHC statistics, router scores.

An FP32 path has one nonlinearity left, the codes of cache rows that flip on a difference of 1e-7 (README of the
golden data); these four are evaluated as well as they can be, so that such flips are the exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import softplus

from dsserve_kernels.reference.moe import ROUTE_EPS
from dsserve_kernels.registry import REGISTRY, Implementation

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve_kernels.registry import Body


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.norm.rms_norm`."""
    wide = x.double()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """See `reference.norm.rope`; the table stays float32."""
    rotated = cos_sin.shape[1] * 2
    shape = (cos_sin.shape[0],) + (1,) * (x.dim() - 2) + (cos_sin.shape[1],)
    turn = torch.view_as_complex(cos_sin.double()).view(shape)
    pairs = x[..., -rotated:].double().view(*x.shape[:-1], rotated // 2, 2)
    result = torch.view_as_complex(pairs) * (turn.conj() if inverse else turn)
    out = x.clone()
    out[..., -rotated:] = torch.view_as_real(result).flatten(-2)
    return out


def hc_stats(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """See `reference.mhc.hc_stats`."""
    flat = streams.flatten(1).double()
    return (
        (flat @ fn.double().mT) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    ).float()


def route_experts(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """See `reference.moe.route_experts`; the scores are rounded once, after the square root."""
    scores = softplus((x.double() @ weight.double().mT) / temperature).sqrt().float()
    ids = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(1, keepdim=True) + ROUTE_EPS) * scale


def _register(*bodies: Body) -> None:
    for body in bodies:
        REGISTRY.add(Implementation(body.__name__, "float64", body, ("cpu", "cuda"), ("fp32",)))


_register(rms_norm, rope, hc_stats, route_experts)
