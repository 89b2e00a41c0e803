"""Random arguments for the fused operators; their chains run on the plain bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsserve_kernels.attention.window_index import WindowIndex
from dsserve_kernels.fused.weights import AttentionInput, AttentionOutput, Experts, SublayerInput
from dsserve_kernels.kvcache.decoded_rings import DecodedRings
from dsserve_kernels.reference.kvcache import store_window_rows
from dsserve_kernels.select import REGISTRY, Operators
from kernel_sources import DIM, ROW_BYTES, STREAMS, RowCase, Source, pool, shared, some_missing


@cache
def fused(name: str) -> Any:
    """Weights of the fused operators; `plain` without activation quantisation."""
    source = Source(98)
    kind, _, plain = name.partition(".")
    quantize = not plain
    return {
        "streams": lambda: SublayerInput(
            norm=shared("norm"),
            norm_eps=1e-20,
            fn=shared("fn"),
            base=shared("base"),
            scale=shared("scale3"),
            num_streams=STREAMS,
            rounds=20,
            eps=1e-6,
            stat_eps=1e-20,
        ),
        "input": lambda: AttentionInput(
            input=source.weight(32 + DIM, DIM),
            query=source.weight(4 * DIM, 32),
            query_norm=source.normal(32),
            latent_norm=shared("norm"),
            eps=1e-20,
            num_heads=4,
            quantize=quantize,
        ),
        "output": lambda: AttentionOutput(
            group=source.weight(2, 32, 2 * DIM), output=source.weight(48, 64), quantize=quantize
        ),
        "experts": lambda: Experts(
            gate=shared("gate")[:-1],
            bias=shared("bias")[:, :-1],
            w13=shared("w13"),
            w2=shared("w2"),
            top_k=3,
            scale=1.5,
            temperature=1.0,
            limit=2.5,
            quantize=quantize,
        ),
    }[kind]()


#: The plain body of every operator, for the chains of fused ones.
REFERENCE = Operators(
    **{
        name: next(body.body for body in bodies if body.name == "reference")
        for name, bodies in REGISTRY.by_operator.items()
    }
)

RING_ROWS, NUM_RINGS = 12, 80


@cache
def rings_pool() -> Tensor:
    """Window rings in which every row but the last of each ring was written."""
    rows = torch.full((RING_ROWS * NUM_RINGS, ROW_BYTES["window"]), 0xFF, dtype=torch.uint8)
    written = torch.arange(len(rows)).view(NUM_RINGS, RING_ROWS)[:, :-1].reshape(-1)
    store_window_rows(rows, written, Source(8).normal(len(written), DIM, dtype=torch.bfloat16))
    return rows


def attend_in_rings(
    body: Any, q: Tensor, latent: Tensor, ring: Tensor, context: Tensor, main: Tensor
) -> tuple[Tensor, Tensor]:
    """Every row is a request of its own: it sees some rows of its ring [T, C] and itself, and writes the last one.

    Returns its output, and the bytes that it wrote.
    """
    stored = rings_pool().clone()
    first = ring * RING_ROWS
    count = context.shape[0]
    index = torch.where(context >= 0, first.unsqueeze(1) + context, -1)
    seen = torch.where(context >= 0, torch.arange(context.numel()).view(context.shape), -1)
    own = context.numel() + torch.arange(count).unsqueeze(1)
    window = WindowIndex(
        window_index=torch.cat((seen, own), dim=1),
        context_index=index.reshape(-1),
        window_store=first + RING_ROWS - 1,
        row_request=torch.arange(count),
        ring_rows=RING_ROWS,
    )
    rings = DecodedRings(RING_ROWS, NUM_RINGS)
    out = body(
        REFERENCE,
        q,
        latent,
        stored,
        window,
        rings,
        pool("main"),
        main,
        shared("sink"),
        scale=0.125,
        round_weights=True,
    )
    return out, stored[window.window_store]


FUSED_CASES: dict[str, RowCase] = {
    "sublayer_input": RowCase(
        lambda s, n, t: (s.normal(n, STREAMS, DIM, dtype=t), s.uniform(n, STREAMS)),
        lambda body, *rows: body(REFERENCE, *rows, fused("streams")),
    ),
    "attention_input": RowCase(
        lambda s, n, t: (s.normal(n, DIM, dtype=t), shared("rope")[s.ints(0, 64, n)]),
        lambda body, *rows: (
            *body(REFERENCE, *rows, fused("input")),
            *body(REFERENCE, *rows, fused("input.plain")),
        ),
    ),
    "window_attention": RowCase(
        lambda s, n, t: (
            s.normal(n, 4, DIM, dtype=t),
            s.normal(n, DIM, dtype=t),
            torch.randperm(NUM_RINGS, generator=s.generator)[:n],
            some_missing(s, s.picks(n, 7, RING_ROWS - 1)),
            some_missing(s, s.picks(n, 8, 40)),
        ),
        attend_in_rings,
    ),
    "attention_output": RowCase(
        lambda s, n, t: (s.normal(n, 4, DIM, dtype=t), shared("rope")[s.ints(0, 64, n)]),
        lambda body, *rows: (
            body(REFERENCE, *rows, fused("output")),
            body(REFERENCE, *rows, fused("output.plain")),
        ),
    ),
    "experts": RowCase(
        lambda s, n, t: (s.normal(n, DIM, dtype=t),),
        lambda body, x: (
            *body(REFERENCE, x, fused("experts")),
            *body(REFERENCE, x, fused("experts.plain")),
        ),
    ),
}
