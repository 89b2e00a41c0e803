"""What surrounds the attention of a layer, few rows with numpy, bit-equal to the chains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsserve_kernels.arrays import register
from dsserve_kernels.fused import chains
from dsserve_kernels.fused.values import (
    is_few,
    is_wide,
    norm,
    rotation_of,
    round_bf16,
    round_fp8,
    times,
    to_bf16,
    to_float32,
)

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve_kernels.fused.weights import AttentionInput, AttentionOutput
    from dsserve_kernels.select import Operators


class _InputArrays:
    """`AttentionInput` as arrays; the products' weights are [k, n]."""

    def __init__(self, weights: AttentionInput) -> None:
        self.input = weights.input.numpy().T
        self.query = weights.query.numpy().T
        self.query_norm, self.latent_norm = weights.query_norm.numpy(), weights.latent_norm.numpy()
        self.rank = len(self.query_norm)
        self.eps = np.float32(weights.eps)


def attention_input(
    ops: Operators, x: Tensor, cos_sin: Tensor, weights: AttentionInput
) -> tuple[Tensor, Tensor, Tensor]:
    """See `chains.attention_input`."""
    is_ours = is_few(x) and weights.quantize
    if not is_ours or not is_wide(weights.input, weights.query):
        return chains.attention_input(ops, x, cos_sin, weights)
    arrays: _InputArrays | None = weights.prepared
    if arrays is None:
        arrays = weights.prepared = _InputArrays(weights)
    rotation = rotation_of(cos_sin)
    projected = round_bf16(times(round_fp8(to_float32(x)), arrays.input))
    low = norm(projected[:, : arrays.rank], arrays.query_norm, arrays.eps)
    query = round_bf16(times(round_fp8(low), arrays.query))
    query = rotation.turn(query.reshape(len(query), weights.num_heads, -1))
    latent = rotation.turn(norm(projected[:, arrays.rank :], arrays.latent_norm, arrays.eps))
    return to_bf16(low), to_bf16(query), to_bf16(latent)


class _OutputArrays:
    """`AttentionOutput` as arrays; the products' weights are [k, n]."""

    def __init__(self, weights: AttentionOutput) -> None:
        self.groups = [group.numpy().T for group in weights.group]
        self.output = weights.output.numpy().T
        self.columns, self.rank = self.groups[0].shape


def attention_output(
    ops: Operators, values: Tensor, cos_sin: Tensor, weights: AttentionOutput
) -> Tensor:
    """See `chains.attention_output`."""
    is_ours = is_few(values) and weights.quantize
    if not is_ours or not is_wide(weights.group, weights.output):
        return chains.attention_output(ops, values, cos_sin, weights)
    arrays: _OutputArrays | None = weights.prepared
    if arrays is None:
        arrays = weights.prepared = _OutputArrays(weights)
    turned = rotation_of(cos_sin).turn(to_float32(values), inverse=True)
    wide = turned.reshape(len(turned), -1).astype(np.float64)
    low = np.empty((len(wide), len(arrays.groups) * arrays.rank))
    for i, group in enumerate(arrays.groups):
        columns = wide[:, i * arrays.columns : (i + 1) * arrays.columns]
        low[:, i * arrays.rank : (i + 1) * arrays.rank] = np.matmul(columns, group)
    narrow = round_bf16(low.astype(np.float32))
    return to_bf16(times(round_fp8(narrow), arrays.output))


register(attention_input, ("released",))
register(attention_output, ("released",))
