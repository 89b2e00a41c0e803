"""What one forward is told: rows, where their keys lie, where their rows go; tensors only, no per-request objects.

All index tensors are int64, -1 = none. T rows of B requests lie back to back. A step runs in two row sets: every
row goes through the encoder half (layers before the last KV source, and that source's own rows); the tail rows go
on through the decoder half (replay.md section 2). Without a cut both sets are the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.engram.staging import StagedRows


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows that run a half of the layers.

    Attributes:
        positions: [T] absolute positions.
        row_request: [T] request of each row, 0..B-1.
        window_index: [T, W] into the step's window rows: the context of all requests (B * C rows), then the T new rows.
        context_index: [B * C] rows of the window rings that precede each request's first row.
        window_store: [T] rows of the window rings that the new rows are written to.
        num_visible: Compression ratio -> [T] compressed rows a query sees.
        floor: [T] first position each row's window may see: its window keys lie at max(floor, p - W + 1) .. p.
    """

    positions: Tensor
    row_request: Tensor
    window_index: Tensor
    context_index: Tensor
    window_store: Tensor
    num_visible: dict[int, Tensor]
    floor: Tensor

    @property
    def num_rows(self) -> int:
        """T."""
        return int(self.positions.shape[0])


@dataclass(frozen=True, slots=True)
class CompressRows:
    """Which compressed rows a step completes, per ratio.

    Attributes:
        rows: [n] row of the token that completes each compressed row (odd positions at ratio 2).
        first: [n] at ratio 2: where the even token's (u, g) lie: a row of the step, or T + a row of the tail rings.
        positions: [n] RoPE position: the first token of the group.
        store: [n] row of the FULL pools to write, -1 below the write floor.
        tail_rows: [m] rows of the step whose (u, g) are kept, and
        tail_store: [m] where in the tail rings.
    """

    rows: Tensor
    first: Tensor
    positions: Tensor
    store: Tensor
    tail_rows: Tensor
    tail_store: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step.

    Attributes:
        token_ids: [T] given ids; -1 = read the token ring at `ring_index`.
        ring_index: [T] row of the flat token ring of each row's own position.
        history_index: [T, N] where the ids of p, p-1, .. lie: a row of the step, or T + a row of the flat token ring.
        seed_index: [s] ring rows to fill with `seed_ids` before anything is read (ids before a request's first row).
        seed_ids: [s].
        ring_rows: [r] rows whose ids are kept in the ring, and
        ring_store: [r] where.
        encoder: Rows of the first half.
        decoder: Rows of the second half.
        tail_rows: [T'] rows of `encoder` that form `decoder`, or None if all do.
        compress: Ratio -> completed rows.
        source_index: Ratio -> [B, N] pool rows of each request's compressed rows.
        max_visible: Ratio -> N as a number known to the host.
        logit_rows: [S] rows of `decoder` that need logits.
        sample_index: [S] request (0..B-1) of each logit row that is sampled.
        sample_store: [S] ring row of each sampled token.
        engram: Engram rows whose fetching began with the plan; None = the forward looks them up.
    """

    token_ids: Tensor
    ring_index: Tensor
    history_index: Tensor
    seed_index: Tensor
    seed_ids: Tensor
    ring_rows: Tensor
    ring_store: Tensor
    encoder: RowSet
    decoder: RowSet
    tail_rows: Tensor | None
    compress: dict[int, CompressRows]
    source_index: dict[int, Tensor]
    max_visible: dict[int, int]
    logit_rows: Tensor
    sample_index: Tensor
    sample_store: Tensor
    engram: StagedRows | None = None

    @classmethod
    def of_rows(cls, rows: RowSet) -> ForwardBatch:
        """A batch of rows whose inputs are given and that have window keys alone: a draft block."""
        none = rows.positions.new_empty(0)
        return cls(
            token_ids=none,
            ring_index=none,
            history_index=none,
            seed_index=none,
            seed_ids=none,
            ring_rows=none,
            ring_store=none,
            encoder=rows,
            decoder=rows,
            tail_rows=None,
            compress={},
            source_index={},
            max_visible={},
            logit_rows=none,
            sample_index=none,
            sample_store=none,
        )
