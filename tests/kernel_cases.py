"""Random arguments for every operator, split into what belongs to rows and what all rows share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsserve_kernels.attention.window_index import WindowIndex
from dsserve_kernels.fused.weights import AttentionInput, AttentionOutput, Experts, SublayerInput
from dsserve_kernels.kvcache.decoded_rings import DecodedRings
from dsserve_kernels.reference.kvcache import store_index_rows, store_main_rows, store_window_rows
from dsserve_kernels.reference.norm import rope_frequencies, rope_table
from dsserve_kernels.select import REGISTRY, Operators

if TYPE_CHECKING:
    from collections.abc import Callable

torch.set_num_threads(1)

DIM, STREAMS, EXPERTS, VOCAB = 64, 4, 8, 100
ROW_BYTES = {"window": DIM + DIM // 32, "main": DIM // 2 + DIM // 16, "index": DIM // 2 + DIM // 32}


class Source:
    """Seeded random tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def weight(self, *shape: int) -> Tensor:
        """A weight as the model prepares it: BF16 numbers in float64."""
        return self.normal(*shape, dtype=torch.bfloat16, scale=0.1).double()

    def picks(self, rows: int, count: int, high: int) -> Tensor:
        """[rows, count] distinct numbers below `high`."""
        order = torch.rand((rows, high), generator=self.generator).argsort(1)
        return order[:, :count]


@dataclass(frozen=True)
class RowCase:
    """An operator: `make(source, rows, dtype)` gives its row arguments, `call(body, *rows)` results by row."""

    make: Callable[[Source, int, torch.dtype], tuple[Tensor, ...]]
    call: Callable[..., Any]


@cache
def shared(name: str) -> Tensor:
    """Arguments that all rows share, the same in every call."""
    source = Source(99)
    return {
        "weight": lambda: source.weight(48, DIM),
        "grouped": lambda: source.weight(2, 24, DIM),
        "w13": lambda: source.weight(EXPERTS, 64, DIM),
        "w2": lambda: source.weight(EXPERTS, DIM, 32),
        "gate": lambda: source.weight(EXPERTS, DIM),
        "bias": lambda: source.normal(1, EXPERTS, scale=0.3),
        "norm": lambda: source.normal(DIM),
        "fn": lambda: source.normal(24, STREAMS * DIM, scale=0.1).double(),
        "base": lambda: source.normal(24),
        "scale3": lambda: source.normal(3),
        "sink": lambda: source.normal(4),
        "windows": lambda: source.normal(50, DIM, dtype=torch.bfloat16),
        "keys": lambda: source.normal(3, 40, DIM, dtype=torch.bfloat16),
        "engram_qk": lambda: source.normal(2, STREAMS, DIM),
        "codes": lambda: source.ints(0, 120, 30, DIM).to(torch.uint8),
        "code_scales": lambda: source.ints(110, 130, 30, 2).to(torch.uint8),
        "token_map": lambda: source.ints(0, 60, VOCAB),
        "multipliers": lambda: source.ints(-(2**62), 2**62, 2, 4),
        "primes": lambda: torch.tensor([[[101, 103], [107, 109], [113, 127]]]).repeat(2, 1, 1),
        "offsets": lambda: torch.arange(12).view(2, 6) * 200,
        "rope": lambda: rope_table(rope_frequencies(32, 10000.0), 64),
    }[name]()


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


@cache
def pool(kind: str) -> Tensor:
    """A pool with 40 written rows and stale bytes behind them."""
    rows = torch.full((44, ROW_BYTES[kind]), 0xFF, dtype=torch.uint8)
    store = {"window": store_window_rows, "main": store_main_rows, "index": store_index_rows}[kind]
    store(rows, torch.arange(40), Source(7).normal(40, DIM, dtype=torch.bfloat16))
    return rows


def some_missing(source: Source, index: Tensor) -> Tensor:
    """A quarter of the entries become -1, and the whole of the first row."""
    index = torch.where(source.uniform(*index.shape) < 0.25, -1, index)
    if index.dim() > 1:
        index[0] = -1
    return index


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
