"""Seeded arguments of operators: random rows, and weights and pools that all rows share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsserve_kernels.reference.kvcache import store_index_rows, store_main_rows, store_window_rows
from dsserve_kernels.reference.norm import rope_frequencies, rope_table

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
