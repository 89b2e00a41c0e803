"""Router and experts of few rows with numpy, bit-equal to the chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import silu

from dsserve_kernels.arrays import in_lanes, register
from dsserve_kernels.fused import chains
from dsserve_kernels.fused.values import (
    is_few,
    is_wide,
    round_bf16,
    round_fp8,
    times,
    to_bf16,
    to_float32,
)
from dsserve_kernels.moe.numpy_experts import root_of_softplus
from dsserve_kernels.reference.moe import ROUTE_EPS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.arrays import Float32, Float64
    from dsserve_kernels.fused.weights import Experts
    from dsserve_kernels.select import Operators


class _Arrays:
    """`Experts` as arrays; the weights of each expert are [k, n]."""

    def __init__(self, weights: Experts) -> None:
        self.gate = weights.gate.numpy().T
        self.bias = weights.bias.numpy()
        self.w13 = [expert.numpy().T for expert in weights.w13]
        self.w2 = [expert.numpy().T for expert in weights.w2]
        self.num_hidden, self.dim = weights.w13.shape[1], weights.w2.shape[1]
        self.top_k = weights.top_k
        self.scale = np.float32(weights.scale)
        self.temperature = np.float32(weights.temperature)
        self.limit, self.least = np.float32(weights.limit), np.float32(-weights.limit)

    def route(self, x: Float64) -> tuple[NDArray[np.int64], Float32]:
        """As `route_experts`."""
        logits = times(x, self.gate)
        np.divide(logits, self.temperature, logits)
        scores = in_lanes(root_of_softplus, logits)
        ids = np.argsort(-(scores + self.bias), 1, "stable")[:, : self.top_k]
        chosen = np.take_along_axis(scores, ids, 1) if len(x) > 1 else scores[:, ids[0]]
        # Torch sums in an order of its own.
        total: Float32 = torch.from_numpy(chosen).sum(1, keepdim=True).numpy()
        return ids, chosen / (total + np.float32(ROUTE_EPS)) * self.scale

    def run(self, inputs: Float64, pairs: _Pairs) -> Float32:
        """As `moe_routed`, pairs of row and expert in the order of the experts: [T, D] -> [T, D]."""
        hidden = np.empty((pairs.count, self.num_hidden))
        for expert, first, last in pairs.runs:
            rows = inputs if pairs.is_single else inputs[pairs.row[first:last]]
            np.matmul(rows, self.w13[expert], out=hidden[first:last])
        active = self._activated(round_bf16(hidden.astype(np.float32)), pairs.weight)
        out = np.empty((pairs.count, self.dim))
        for expert, first, last in pairs.runs:
            np.matmul(active[first:last], self.w2[expert], out=out[first:last])
        return pairs.sums(round_bf16(out.astype(np.float32)))

    def _activated(self, hidden: Float32, weight: Float32) -> Float64:
        """Clamped SwiGLU of [R, 2F], weighted, and `Q8` of it."""
        half = hidden.shape[1] // 2
        gate = np.minimum(hidden[:, :half], self.limit)
        up = np.minimum(hidden[:, half:], self.limit)
        np.maximum(up, self.least, out=up)
        active = in_lanes(silu, gate)
        np.multiply(active, up, active)
        np.multiply(weight, active, active)
        return round_fp8(round_bf16(active))


class _Pairs:
    """Pairs of row and chosen expert (the shared one of every row last), in the order of the experts."""

    def __init__(self, ids: NDArray[np.int64], weights: Float32, shared: int) -> None:
        rows, top_k = ids.shape
        self.is_single = rows == 1
        self.count = rows * (top_k + 1)
        if self.is_single:
            order = np.argsort(ids[0])
            self.runs = [(e, i, i + 1) for i, e in enumerate([*ids[0][order].tolist(), shared])]
            self.weight = np.append(weights[0][order], np.float32(1))[:, None]
            return
        flat = ids.reshape(-1)
        order = flat.argsort(kind="stable")
        self.row = np.concatenate((order // top_k, np.arange(rows)))
        self.weight = np.append(weights.reshape(-1)[order], np.ones(rows, np.float32))[:, None]
        self.runs = _runs(flat[order].tolist())
        self.runs.append((shared, rows * top_k, self.count))
        # Back to the order of rows; within a row the experts still ascend, and the sum runs in that order.
        self._place = self.row.argsort(kind="stable").reshape(rows, top_k + 1)

    def sums(self, out: Float32) -> Float32:
        """[R, D] -> [T, D]."""
        if self.is_single:
            return np.add.reduce(out, 0, keepdims=True)
        total = out[self._place[:, 0]]
        for column in range(1, self._place.shape[1]):
            np.add(total, out[self._place[:, column]], total)
        return total


def _runs(ids: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first pair, end) of each expert that has pairs."""
    starts = [i for i, expert in enumerate(ids) if i == 0 or expert != ids[i - 1]]
    return [
        (ids[start], start, end) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
    ]


def experts(ops: Operators, x: Tensor, weights: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """See `chains.experts`."""
    is_ours = is_few(x) and weights.quantize
    if not is_ours or not is_wide(weights.gate, weights.w13, weights.w2):
        return chains.experts(ops, x, weights)
    arrays: _Arrays | None = weights.prepared
    if arrays is None:
        arrays = weights.prepared = _Arrays(weights)
    wide = to_float32(x)
    ids, shares = arrays.route(wide.astype(np.float64))
    total = arrays.run(round_fp8(wide), _Pairs(ids, shares, len(arrays.w13) - 1))
    return to_bf16(total), torch.from_numpy(ids), torch.from_numpy(shares)


register(experts, ("released",))
