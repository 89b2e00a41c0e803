"""Random arguments for every operator, split into what belongs to rows and what all rows share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsserve_kernels.select import REGISTRY
from fused_cases import FUSED_CASES
from kernel_sources import (
    DIM,
    EXPERTS,
    ROW_BYTES,
    STREAMS,
    VOCAB,
    RowCase,
    Source,
    pool,
    shared,
    some_missing,
)
from speculative_cases import SPECULATIVE_CASES


def _linear(**options: Any) -> RowCase:
    return RowCase(
        lambda s, n, t: (s.normal(n, DIM, dtype=t),),
        lambda body, x: body(x, shared("weight"), **options),
    )


def _round() -> RowCase:
    return RowCase(lambda s, n, t: (s.normal(n, DIM, dtype=t, scale=3.0),), lambda body, x: body(x))


def _store(kind: str) -> RowCase:
    def call(body: Any, index: Tensor, rows: Tensor) -> Tensor:
        stored = torch.full((80, ROW_BYTES[kind]), 0xFF, dtype=torch.uint8)
        body(stored, index, rows)
        kept = stored[index.clamp_min(0)]
        return kept.masked_fill((index < 0).unsqueeze(1), 0)

    return RowCase(
        lambda s, n, t: (
            some_missing(s, torch.randperm(80, generator=s.generator)[:n]),
            s.normal(n, DIM, dtype=t),
        ),
        call,
    )


def _load(kind: str) -> RowCase:
    return RowCase(
        lambda s, n, _: (some_missing(s, s.ints(0, 40, n, 3)),),
        lambda body, index: body(pool(kind), index, torch.bfloat16),
    )


def _sampling(source: Source, rows: int, _: torch.dtype) -> tuple[Tensor, ...]:
    temperature = torch.where(source.uniform(rows) < 0.3, 0.0, source.uniform(rows) + 0.2)
    return (
        source.normal(rows, VOCAB, scale=2.0),
        temperature,
        source.ints(1, VOCAB + 1, rows),
        source.uniform(rows) * 0.9 + 0.1,
        source.uniform(rows) * 0.2,
        source.ints(0, 2**62, rows),
        source.ints(0, 500, rows),
    )


CASES: dict[str, RowCase] = {
    "linear_fp8": _linear(quantize=True),
    "linear": _linear(),
    "linear_fp32": _linear(),
    "grouped_linear": RowCase(
        lambda s, n, t: (s.normal(n, 2, DIM, dtype=t),),
        lambda body, o: body(o, shared("grouped")),
    ),
    "rms_norm": RowCase(
        lambda s, n, t: (s.normal(n, DIM, dtype=t),),
        lambda body, x: body(x, shared("norm"), 1e-20),
    ),
    "rope": RowCase(
        lambda s, n, t: (s.normal(n, 2, DIM, dtype=t), shared("rope")[s.ints(0, 64, n)]),
        lambda body, x, table: (body(x, table), body(x, table, inverse=True)),
    ),
    "round_fp8": _round(),
    "round_fp4_index": _round(),
    "round_fp4_main": _round(),
    **{f"store_{kind}_rows": _store(kind) for kind in ROW_BYTES},
    **{f"load_{kind}_rows": _load(kind) for kind in ROW_BYTES},
    "sparse_attention": RowCase(
        lambda s, n, t: (
            s.normal(n, 4, DIM, dtype=t),
            some_missing(s, s.picks(n, 16, 50)),
            some_missing(s, s.picks(n, 8, 40)),
        ),
        lambda body, q, window, main: (
            body(
                q,
                shared("windows"),
                window,
                pool("main"),
                main,
                shared("sink"),
                scale=0.125,
                round_weights=True,
            ),
            body(
                q,
                shared("windows"),
                window,
                None,
                None,
                shared("sink"),
                scale=0.125,
                round_weights=False,
            ),
        ),
    ),
    "pool_pairs": RowCase(
        lambda s, n, _: (s.normal(n, 2, DIM), s.normal(n, 2, DIM)),
        lambda body, first, second: body(first, second, torch.bfloat16),
    ),
    "index_scores": RowCase(
        lambda s, n, t: (
            s.normal(n, 4, DIM, dtype=t),
            s.normal(n, 4),
            s.ints(0, 3, n),
            s.ints(0, 41, n),
        ),
        lambda body, q, weights, request, visible: body(
            q, weights, shared("keys"), request, visible
        ),
    ),
    "topk_rows": RowCase(
        lambda s, n, _: (s.normal(n, 40).round(),), lambda body, scores: body(scores, 7)
    ),
    "candidate_mask": RowCase(
        lambda s, n, _: _scores(s, n), lambda body, *rows: body(*rows, block_size=4, num_blocks=3)
    ),
    "engram_hash": RowCase(
        lambda s, n, _: (some_missing(s, s.ints(0, VOCAB, n, 4)),),
        lambda body, history: body(
            history,
            shared("token_map"),
            shared("multipliers"),
            shared("primes"),
            shared("offsets"),
            2,
        ),
    ),
    "engram_gather": RowCase(
        lambda s, n, _: (s.ints(0, 30, n, 3),),
        lambda body, rows: body(shared("codes"), shared("code_scales"), rows, torch.bfloat16),
    ),
    "engram_gate": RowCase(
        lambda s, n, t: (
            s.normal(n, STREAMS, DIM, dtype=t),
            s.normal(n, (STREAMS + 1) * DIM, dtype=t),
        ),
        lambda body, streams, kv: body(
            streams, kv, shared("engram_qk")[0], shared("engram_qk")[1], None
        ),
    ),
    "hc_stats": RowCase(
        lambda s, n, t: (s.normal(n, STREAMS, DIM, dtype=t),),
        lambda body, streams: body(streams, shared("fn"), 1e-20),
    ),
    "hc_split_sinkhorn": RowCase(
        lambda s, n, _: (s.normal(n, 24, scale=2.0),),
        lambda body, z: body(
            z, shared("base"), shared("scale3"), num_streams=STREAMS, rounds=20, eps=1e-6
        ),
    ),
    "hc_collapse": RowCase(
        lambda s, n, t: (s.normal(n, STREAMS, DIM, dtype=t), s.uniform(n, STREAMS)),
        lambda body, streams, pre: body(streams, pre),
    ),
    "hc_expand": RowCase(
        lambda s, n, t: (
            s.normal(n, DIM, dtype=t),
            s.normal(n, STREAMS, DIM, dtype=t),
            s.uniform(n, STREAMS),
            s.uniform(n, STREAMS, STREAMS),
        ),
        lambda body, *rows: body(*rows),
    ),
    "route_experts": RowCase(
        lambda s, n, t: (s.normal(n, DIM, dtype=t),),
        lambda body, x: body(
            x, shared("gate"), shared("bias"), top_k=3, scale=1.5, temperature=1.0
        ),
    ),
    "swiglu": RowCase(
        lambda s, n, t: (
            s.normal(n, 33, dtype=t, scale=3.0),
            s.normal(n, 33, dtype=t, scale=3.0),
            s.uniform(n, 1),
        ),
        lambda body, gate, up, weight: (
            body(gate, up, 2.5, weight, gate.dtype),
            body(gate, up, 2.5, None, gate.dtype),
        ),
    ),
    "moe_routed": RowCase(
        lambda s, n, t: (s.normal(n, DIM, dtype=t), s.picks(n, 3, EXPERTS), s.uniform(n, 3)),
        lambda body, x, ids, weights: tuple(
            body(x, ids, weights, shared("w13"), shared("w2"), limit=2.5, quantize=quantize)
            for quantize in (True, False)
        ),
    ),
    **FUSED_CASES,
    "apply_penalties": RowCase(
        lambda s, n, _: (
            s.normal(n, VOCAB),
            s.ints(0, 3, n, VOCAB).int(),
            s.uniform(n, VOCAB) < 0.3,
            s.uniform(n, 1) + 0.5,
            s.uniform(n, 1),
            s.uniform(n, 1),
        ),
        lambda body, *rows: body(*rows),
    ),
    "sample": RowCase(_sampling, lambda body, *rows: body(*rows)),
    "sampling_distribution": RowCase(
        lambda s, n, t: _sampling(s, n, t)[:5], lambda body, *rows: body(*rows)
    ),
    **SPECULATIVE_CASES,
}


def _scores(source: Source, rows: int) -> tuple[Tensor, Tensor]:
    visible = source.ints(0, 39, rows)
    scores = source.normal(rows, 38)
    return scores.masked_fill(torch.arange(38) >= visible.unsqueeze(1), -torch.inf), visible


BODIES = [
    (operator, body.name)
    for operator in REGISTRY.operators()
    for body in REGISTRY.by_operator[operator]
]


def run(operator: str, name: str, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Results of one body for some rows, always as a tuple."""
    [body] = [entry.body for entry in REGISTRY.by_operator[operator] if entry.name == name]
    result = CASES[operator].call(body, *(tensor.clone() for tensor in rows))
    return result if isinstance(result, tuple) else (result,)
