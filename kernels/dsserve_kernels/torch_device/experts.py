"""Router and experts whose work does not depend on which experts were chosen (model.md section 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.math import matmul, softplus
from dsserve_kernels.reference.moe import ROUTE_EPS, swiglu
from dsserve_kernels.reference.quant import round_fp8_wide
from dsserve_kernels.torch_device.register import register

#: float64 numbers that one product may write at once when every row goes through every expert (256 MiB).
MAX_PRODUCTS = 1 << 25


def route_experts(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """See `reference.moe.route_experts`."""
    logits = matmul(x, weight, torch.float32)
    # By a tensor: CUDA multiplies by the rounded reciprocal of a number.
    scores = softplus(logits / logits.new_full((), temperature)).sqrt()
    ids = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(1, keepdim=True) + ROUTE_EPS) * scale


def moe_routed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    limit: float,
    quantize: bool,
) -> Tensor:
    """See `reference.moe.moe_routed`.

    Few rows read the weights of their own experts. Many go through all experts, some rows at a time, and keep what
    they had chosen: a product with weights that nobody chose costs less than asking the host who chose what.
    """
    rows, top_k = ids.shape
    if rows == 0:
        return x.new_zeros(0, w2.shape[1], dtype=torch.float32)
    ids, by_id = ids.sort(dim=1)
    pair_weights = weights.gather(1, by_id)
    inputs = _wide(x, quantize)
    if rows * top_k < w13.shape[0]:
        hidden = torch.matmul(w13[ids].double(), inputs[:, None, :, None]).squeeze(-1)
        active = _activated(hidden, pair_weights, limit, x.dtype, quantize)
        out = torch.matmul(w2[ids].double(), active.unsqueeze(-1)).squeeze(-1)
    else:
        step = max(MAX_PRODUCTS // (w13.shape[0] * max(w13.shape[1], w2.shape[1])), 1)
        parts = [
            _through_all(inputs[p], ids[p], pair_weights[p], w13, w2, limit, x.dtype, quantize)
            for p in (slice(start, start + step) for start in range(0, rows, step))
        ]
        out = torch.cat(parts)
    out = out.to(x.dtype).float()
    total = out[:, 0]
    for column in range(1, top_k):
        total = total + out[:, column]
    return total


def _wide(x: Tensor, quantize: bool) -> Tensor:
    return round_fp8_wide(x, torch.float64) if quantize else x.double()


def _activated(
    hidden: Tensor, weights: Tensor, limit: float, dtype: torch.dtype, quantize: bool
) -> Tensor:
    """Hidden [T, k, 2F] float64, weights [T, k] -> [T, k, F] float64, what enters w2."""
    gate, up = hidden.to(dtype).chunk(2, dim=-1)
    return _wide(swiglu(gate, up, limit, weights.unsqueeze(-1), dtype), quantize)


def _through_all(
    inputs: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    dtype: torch.dtype,
    quantize: bool,
) -> Tensor:
    """Outputs [T, k, D] float64 of rows [T, D], each computed by every expert."""
    row = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
    every = torch.matmul(inputs, w13.double().transpose(1, 2))
    active = _activated(every[ids, row], weights, limit, dtype, quantize)
    spread = active.new_zeros(w2.shape[0], ids.shape[0], w2.shape[2])
    spread[ids, row] = active
    return torch.bmm(spread, w2.double().transpose(1, 2))[ids, row]


register(route_experts, ("released", "fast"))
register(moe_routed)
