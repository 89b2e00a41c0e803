"""Router and experts (model.md section 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.math import matmul, silu, softplus
from dsserve_kernels.reference.quant import round_fp8
from dsserve_kernels.registry import reference

#: Constant of the normalising sum; not `rms_norm_eps`.
ROUTE_EPS = 1e-20


@reference("route_experts")
def route_experts(
    x: Tensor, weight64: Tensor, bias: Tensor, *, top_k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Bias-corrected selection; the weights come from the raw scores.

    Args:
        x: [T, D] activation.
        weight64: [E, D] float64.
        bias: [T or 1, E] float32, text or vision bias of each row.
        top_k: Experts per row.
        scale: `routed_scaling_factor`.
        temperature: `gate_temp`.

    Returns:
        ids [T, k] int64 in descending biased score (ties to the lower id), weights [T, k] float32.
    """
    logits = matmul(x, weight64, torch.float32) / temperature
    scores = softplus(logits).sqrt()
    ids = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(1, keepdim=True) + ROUTE_EPS) * scale


@reference("swiglu")
def swiglu(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Clamped SwiGLU with the routing weight applied before w2; rounded once to `dtype`.

    Args:
        gate: [R, F], w1's output; clamped from above only.
        up: [R, F], w3's output; clamped on both sides.
        limit: `swiglu_limit`.
        weight: [R, 1] float32 or None.
        dtype: Result type.
    """
    u, v = gate.float().clamp_max(limit), up.float().clamp(-limit, limit)
    value = silu(u) * v
    return (value if weight is None else weight * value).to(dtype)


@reference("moe_routed")
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
    """Sum of the chosen experts, accumulated in float32 in the order of the expert ids.

    Args:
        x: [T, D] activation.
        ids: [T, k] int64.
        weights: [T, k] float32.
        w13: [E, 2F, D] float64: gate rows, then up rows.
        w2: [E, D, F] float64.
        limit: `swiglu_limit`.
        quantize: `Q8` on the inputs of both products.

    Returns:
        [T, D] float32.
    """
    num_experts, top_k = w13.shape[0], ids.shape[1]
    order = torch.sort(ids.flatten(), stable=True).indices
    rows = order.div(top_k, rounding_mode="floor")
    counts = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    inputs = (round_fp8(x) if quantize else x).double()[rows]
    hidden = _per_expert(inputs, w13, counts).to(x.dtype)
    gate, up = hidden.chunk(2, dim=1)
    active = swiglu(gate, up, limit, weights.flatten()[order].unsqueeze(1), x.dtype)
    active = (round_fp8(active) if quantize else active).double()
    out = _per_expert(active, w2, counts).to(x.dtype).float()
    # Within a row the pairs are in ascending expert id, so adding column by column keeps that order.
    by_row = torch.sort(rows, stable=True).indices.view(-1, top_k)
    total = torch.zeros(x.shape[0], out.shape[1], dtype=torch.float32, device=x.device)
    for column in range(top_k):
        total += out[by_row[:, column]]
    return total


def _per_expert(inputs: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Rows sorted by expert times that expert's weight."""
    pieces, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            pieces.append(inputs[start : start + count] @ weights[expert].mT)
            start += count
    if not pieces:
        return inputs.new_zeros(0, weights.shape[1])
    return torch.cat(pieces)
