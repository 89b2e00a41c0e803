"""Random arguments of the operators that draw, accept and share out drafts (see `kernel_cases`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_sources import RowCase, Source

if TYPE_CHECKING:
    from torch import Tensor

_DRAFTS, _VOCAB = 4, 24


def _counters(source: Source, rows: int) -> tuple[Tensor, Tensor]:
    """Seeds and positions of anchors."""
    return source.ints(0, 2**62, rows), source.ints(0, 500, rows)


def _temperatures(source: Source, rows: int) -> Tensor:
    return torch.where(source.uniform(rows) < 0.3, 0.0, source.uniform(rows) + 0.2)


def _distributions(source: Source, rows: int, places: int) -> Tensor:
    return source.normal(rows, places, _VOCAB, scale=2.0).double().softmax(-1)


def _accepting(source: Source, rows: int, _: torch.dtype) -> tuple[Tensor, ...]:
    return (
        source.ints(0, _VOCAB, rows, _DRAFTS),
        _distributions(source, rows, _DRAFTS + 1),
        _distributions(source, rows, _DRAFTS),
        source.ints(0, _DRAFTS + 1, rows),
        *_counters(source, rows),
    )


def _drawn(source: Source, rows: int, _: torch.dtype) -> tuple[Tensor, ...]:
    drawn = source.ints(0, _VOCAB, rows, _DRAFTS + 1)
    is_right = source.uniform(rows, _DRAFTS) < 0.6
    drafts = torch.where(is_right, drawn[:, :-1], source.ints(0, _VOCAB, rows, _DRAFTS))
    return drafts, drawn, source.ints(0, _DRAFTS + 1, rows)


SPECULATIVE_CASES: dict[str, RowCase] = {
    "accept_draws": RowCase(_drawn, lambda body, *rows: body(*rows)),
    "accept_sampled": RowCase(_accepting, lambda body, *rows: body(*rows)),
    "accept_block": RowCase(_accepting, lambda body, *rows: body(*rows)),
    "draw_drafts": RowCase(
        lambda s, n, _: (
            s.normal(n, _VOCAB, scale=2.0),
            _temperatures(s, n),
            *_counters(s, n),
        ),
        lambda body, *rows: tuple(body(*rows, place) for place in range(_DRAFTS)),
    ),
    "draft_distribution": RowCase(
        lambda s, n, _: (s.normal(n, _DRAFTS, _VOCAB, scale=2.0), _temperatures(s, n)),
        lambda body, *rows: body(*rows),
    ),
    "simulate_accepted": RowCase(
        lambda s, n, _: (
            s.uniform(n).double() * _DRAFTS,
            s.ints(0, _DRAFTS + 1, n),
            *_counters(s, n),
        ),
        lambda body, *rows: body(*rows),
    ),
    # Requests share a budget, so only one that suffices for all leaves a row to itself; scarce ones: test_speculative.py.
    "allocate_drafts": RowCase(
        lambda s, n, _: (
            s.uniform(n, _DRAFTS).cumprod(1),
            s.ints(0, _DRAFTS + 1, n),
        ),
        lambda body, survival, limits: body(survival, limits, int(limits.sum())),
    ),
}
