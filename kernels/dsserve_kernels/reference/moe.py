"""Router and experts (model.md section 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.math import matmul, silu, softplus
from dsserve_kernels.reference.quant import round_fp8_wide
from dsserve_kernels.registry import reference

#: Constant of the normalising sum; not `rms_norm_eps`.
ROUTE_EPS = 1e-20


@reference("route_experts")
def route_experts(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Bias-corrected selection; the weights come from the raw scores.

    Args:
        x: [T, D] activation.
        weight: [E, D].
        bias: [T or 1, E] float32, text or vision bias of each row.
        top_k: Experts per row.
        scale: `routed_scaling_factor`.
        temperature: `gate_temp`.

    Returns:
        ids [T, k] int64 in descending biased score (ties to the lower id), weights [T, k] float32.
    """
    logits = matmul(x, weight, torch.float32) / temperature
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
        w13: [E, 2F, D], as in `linear_fp8`: gate rows, then up rows.
        w2: [E, D, F].
        limit: `swiglu_limit`.
        quantize: `Q8` on the inputs of both products.

    Returns:
        [T, D] float32.
    """
    top_k = ids.shape[1]
    # Ascending ids within a row fix the order of the final sum.
    ids, by_id = ids.sort(dim=1)
    pair_ids, pair_weights = ids.flatten(), weights.gather(1, by_id).view(-1, 1)
    inputs = (round_fp8_wide(x, torch.float64) if quantize else x.double()).repeat_interleave(
        top_k, 0
    )
    hidden = _per_expert(inputs, pair_ids, w13).to(x.dtype)
    gate, up = hidden.chunk(2, dim=1)
    active = swiglu(gate, up, limit, pair_weights, x.dtype)
    active = round_fp8_wide(active, torch.float64) if quantize else active.double()
    out = _per_expert(active, pair_ids, w2).to(x.dtype).float()
    out = out.view(x.shape[0], top_k, w2.shape[1])
    total = out[:, 0]
    for column in range(1, top_k):
        total = total + out[:, column]
    return total


def _per_expert(inputs: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
    """Each row times the weight of its expert: [R, k], [R], [E, n, k] -> [R, n] float64."""
    result = inputs.new_empty(len(expert), weights.shape[1])
    rows_of: dict[int, list[int]] = {}
    for row, index in enumerate(expert.tolist()):
        rows_of.setdefault(index, []).append(row)
    for index, rows in rows_of.items():
        if len(rows) == 1:
            torch.mv(weights[index].double(), inputs[rows[0]], out=result[rows[0]])
        else:
            result[rows] = torch.mm(inputs[rows], weights[index].double().mT)
    return result
