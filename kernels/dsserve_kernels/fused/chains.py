"""The chain of single operators behind each fused operator: any device, any policy, the oracle of the fused bodies.

A fused operator takes the selected operators as its first argument, so that its chain runs on those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsserve_kernels.registry import reference

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve_kernels.attention.window_index import WindowIndex
    from dsserve_kernels.fused.weights import (
        AttentionInput,
        AttentionOutput,
        Experts,
        SublayerInput,
    )
    from dsserve_kernels.kvcache.decoded_rings import DecodedRings
    from dsserve_kernels.select import Operators


@reference("sublayer_input")
def sublayer_input(
    ops: Operators, streams: Tensor, pre: Tensor, weights: SublayerInput
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a sublayer starts from, and how its output is mixed back (model.md section 4).

    Args:
        ops: The selected operators.
        streams: [T, n, D].
        pre: [T, n] pre-mix from the sublayer before.
        weights: Of this sublayer.

    Returns:
        Its input x [T, D], pre [T, n] of the next sublayer, post [T, n] and comb [T, n, n] of this one.
    """
    x = ops.rms_norm(ops.hc_collapse(streams, pre), weights.norm, weights.norm_eps)
    return (x, *mixes(ops, streams, weights))


def mixes(ops: Operators, streams: Tensor, weights: SublayerInput) -> tuple[Tensor, Tensor, Tensor]:
    """The last three results of `sublayer_input`."""
    z = ops.hc_stats(streams, weights.fn, weights.stat_eps)
    pre, post, comb = ops.hc_split_sinkhorn(
        z,
        weights.base,
        weights.scale,
        num_streams=weights.num_streams,
        rounds=weights.rounds,
        eps=weights.eps,
    )
    return pre, post, comb


@reference("attention_input")
def attention_input(
    ops: Operators, x: Tensor, cos_sin: Tensor, weights: AttentionInput
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and the new window row of each row.

    Args:
        ops: The selected operators.
        x: [T, D].
        cos_sin: [T, rotated / 2, 2] float32.
        weights: Of the layer.

    Returns:
        The normalised low-rank query [T, r], queries [T, H, d] and the latent [T, d], both rotated.
    """
    rank = weights.query_norm.shape[0]
    projected = ops.linear_fp8(x, weights.input, quantize=weights.quantize)
    low = ops.rms_norm(projected[:, :rank], weights.query_norm, weights.eps)
    query = ops.linear_fp8(low, weights.query, quantize=weights.quantize)
    query = query.view(x.shape[0], weights.num_heads, query.shape[1] // weights.num_heads)
    latent = ops.rms_norm(projected[:, rank:], weights.latent_norm, weights.eps)
    return low, ops.rope(query, cos_sin), ops.rope(latent, cos_sin)


@reference("window_attention")
def window_attention(
    ops: Operators,
    q: Tensor,
    latent: Tensor,
    pool: Tensor,
    index: WindowIndex,
    rings: DecodedRings | None,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    *,
    scale: float,
    round_weights: bool,
) -> Tensor:
    """Stores the new window rows, then attends over windows and selected compressed rows.

    Args:
        ops: The selected operators.
        q: [T, H, d].
        latent: [T, d] new window rows.
        pool: Window rows of the layer; written.
        index: Where window rows lie.
        rings: What a body remembers of `pool` from step to step, or None.
        main_pool: See `sparse_attention`.
        main_index: See `sparse_attention`.
        sink: See `sparse_attention`.
        scale: See `sparse_attention`.
        round_weights: See `sparse_attention`.

    Returns:
        [T, H, d].
    """
    del rings  # the chain decodes all it reads
    context = ops.load_window_rows(pool, index.context_index, latent.dtype)
    new = ops.store_window_rows(pool, index.window_store, latent)
    result: Tensor = ops.sparse_attention(
        q,
        torch.cat((context, new)),
        index.window_index,
        main_pool,
        main_index,
        sink,
        scale=scale,
        round_weights=round_weights,
    )
    return result


@reference("attention_output")
def attention_output(
    ops: Operators, values: Tensor, cos_sin: Tensor, weights: AttentionOutput
) -> Tensor:
    """The layer's attention output [T, D] of the heads' values [T, H, d]: inverse rotation, `wo_a`, `wo_b`."""
    turned = ops.rope(values, cos_sin, inverse=True)
    groups, _, columns = weights.group.shape
    low = ops.grouped_linear(turned.view(values.shape[0], groups, columns), weights.group)
    result: Tensor = ops.linear_fp8(low, weights.output, quantize=weights.quantize)
    return result


@reference("experts")
def experts(ops: Operators, x: Tensor, weights: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """Router and experts of a layer.

    Args:
        ops: The selected operators.
        x: [T, D].
        weights: Of the layer.

    Returns:
        Output [T, D], rounded once; ids [T, k] int64 and weights [T, k] float32 of the routed experts.
    """
    ids, shares = ops.route_experts(
        x,
        weights.gate,
        weights.bias,
        top_k=weights.top_k,
        scale=weights.scale,
        temperature=weights.temperature,
    )
    # The shared expert is one more that every row chooses: a row's inputs are quantised once for all, and as the
    # last id it comes last in the sum, with a weight of exactly one.
    rows, shared_id = x.shape[0], weights.w13.shape[0] - 1
    result = ops.moe_routed(
        x,
        torch.cat((ids, ids.new_full((rows, 1), shared_id)), dim=1),
        torch.cat((shares, shares.new_ones(rows, 1)), dim=1),
        weights.w13,
        weights.w2,
        limit=weights.limit,
        quantize=weights.quantize,
    )
    return result.to(x.dtype), ids, shares
