"""Router and experts of few rows with numpy, bit-equal to the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import silu, softplus

from dsserve_kernels.arrays import (
    in_lanes,
    is_small,
    narrowed,
    register,
    row_blocks,
    widened,
)
from dsserve_kernels.quant.numpy_fp8 import round_fp8_array
from dsserve_kernels.reference import moe as reference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.arrays import Float32, Float64


def route_experts(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """See `reference.moe.route_experts`."""
    if not is_small(x):
        return reference.route_experts(
            x, weight, bias, top_k=top_k, scale=scale, temperature=temperature
        )
    logits: Float32 = torch.mm(x.double(), weight.double().mT).float().numpy()
    np.divide(logits, np.float32(temperature), logits)
    scores = in_lanes(root_of_softplus, logits)
    ids = np.argsort(-(scores + bias.numpy()), 1, "stable")[:, :top_k]
    offsets = np.arange(0, scores.size, scores.shape[1])[:, None]
    chosen = scores.take(ids + offsets)
    # Torch sums in an order of its own.
    total = torch.from_numpy(chosen).sum(1, keepdim=True).numpy()
    weights = chosen / (total + np.float32(reference.ROUTE_EPS)) * np.float32(scale)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def root_of_softplus(x: Tensor) -> Tensor:
    """Router scores of logits, on whole vector lanes."""
    # Torch's square root of float32 is one of MKL and not rounded correctly (unlike its rsqrt), so no numpy here.
    return softplus(x).sqrt_()


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
    """See `reference.moe.moe_routed`; pairs of row and expert are kept in the order of the experts."""
    rows, top_k = ids.shape
    if rows == 0:
        return reference.moe_routed(x, ids, weights, w13, w2, limit=limit, quantize=quantize)
    pair_ids = ids.numpy().reshape(-1)
    order = pair_ids.argsort(kind="stable")
    row_of, sorted_ids = order // top_k, pair_ids[order]
    sorted_weights = weights.numpy().reshape(-1)[order][:, None]
    inputs = _widened_rows(x, quantize)
    experts = _Experts(w13, w2, np.float32(limit), quantize, x.dtype)
    out = np.empty((len(order), w2.shape[1]), dtype=np.float32)
    for block in row_blocks(len(order), x.shape[1]):
        out[block] = experts.run(inputs[row_of[block]], sorted_ids[block], sorted_weights[block])
    # Back to the order of rows; within a row the ids still ascend, and the sum runs in that order.
    place = row_of.argsort(kind="stable").reshape(rows, top_k)
    total = out.take(place[:, 0], 0)
    for column in range(1, top_k):
        np.add(total, out.take(place[:, column], 0), total)
    return torch.from_numpy(total)


def _widened_rows(x: Tensor, quantize: bool) -> Float64:
    """The inputs of the first product."""
    inputs = np.empty(x.shape)
    for block in row_blocks(*x.shape):
        wide = widened(x[block])
        inputs[block] = round_fp8_array(wide) if quantize else wide
    return inputs


@dataclass(frozen=True, slots=True)
class _Experts:
    """The weights of `moe_routed` and how it rounds."""

    w13: Tensor
    w2: Tensor
    limit: np.float32
    quantize: bool
    dtype: torch.dtype

    def run(self, inputs: Float64, ids: NDArray[np.int64], weights: Float32) -> Float32:
        """Outputs [R, D] of inputs [R, D] of experts `ids` [R], ascending; `weights` [R, 1] scale what enters w2."""
        runs = _runs(ids)
        hidden = narrowed(_per_expert(inputs, runs, self.w13), self.dtype)
        half = hidden.shape[1] // 2
        gate = np.minimum(hidden[:, :half], self.limit)
        up = np.clip(hidden[:, half:], -self.limit, self.limit)
        active = in_lanes(silu, gate)
        np.multiply(active, up, active)
        np.multiply(weights, active, active)
        active = narrowed(torch.from_numpy(active), self.dtype)
        wide = round_fp8_array(active) if self.quantize else active.astype(np.float64)
        return narrowed(_per_expert(wide, runs, self.w2), self.dtype)


def _runs(sorted_ids: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(expert, first pair, end) of each expert that has pairs."""
    ids = sorted_ids.tolist()
    starts = [i for i, expert in enumerate(ids) if i == 0 or expert != ids[i - 1]]
    return [
        (ids[start], start, end) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
    ]


def _per_expert(inputs: Float64, runs: list[tuple[int, int, int]], weights: Tensor) -> Tensor:
    """Each pair's input times the weight of its expert: [R, k], [E, n, k] -> [R, n] float64."""
    source = torch.from_numpy(inputs)
    result = source.new_empty(len(inputs), weights.shape[1])
    for expert, start, end in runs:
        if end - start == 1:
            torch.mv(weights[expert].double(), source[start], out=result[start])
        else:
            torch.mm(source[start:end], weights[expert].double().mT, out=result[start:end])
    return result


register(route_experts, ("released", "fast"))
register(moe_routed)
