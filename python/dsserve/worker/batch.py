"""Turns the arrays of a `StepPlan` into the index tensors of a `ForwardBatch`, on the host and without a loop per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsserve.kv.layout import TAIL_RING, TOKEN_RING, KvLayout
from dsserve.models.batch import CompressRows, ForwardBatch, RowSet
from dsserve.replay.floors import row_floors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsserve.config.model import ModelConfig

Array = NDArray[np.int64]

#: Indices of `StepPlan.header` (design of the plan: docs/architecture.md).
(
    STEP_ID,
    PHASE,
    NUM_REQUESTS,
    NUM_ROWS,
    NUM_DELTAS,
    NUM_TAIL_ROWS,
    NUM_RELEASED,
    NUM_SAMPLES,
    MAX_LEN,
) = range(9)

#: `history_ids` of rows behind ids that the device has.
FROM_RING = -2


@dataclass(frozen=True, slots=True)
class PlanView:
    """The used parts of one buffer set, widened to int64.

    Attributes are the fields of `StepPlan` (B requests, T rows); see `docs/architecture.md`.
    """

    step_id: int
    phase: int
    request_id: NDArray[np.uint64]
    request_slot: Array
    cu_seqlens: Array
    start_position: Array
    tail_len: Array
    draft_len: Array
    window_floor: Array
    write_floor: Array
    tail_floor: Array
    samples: NDArray[np.bool_]
    history_ids: Array
    token_ids: Array
    positions: Array
    page_deltas: Array
    released_slots: Array

    @classmethod
    def of(cls, buffers: Mapping[str, NDArray[np.generic]]) -> PlanView:
        """Copy the used parts out, so that the set may be rewritten."""
        header = buffers["header"]
        requests, rows = int(header[NUM_REQUESTS]), int(header[NUM_ROWS])

        def part(name: str, length: int) -> Array:
            return buffers[name][:length].astype(np.int64)

        return cls(
            step_id=int(header[STEP_ID]),
            phase=int(header[PHASE]),
            request_id=buffers["request_id"][:requests].astype(np.uint64),
            request_slot=part("request_slot", requests),
            cu_seqlens=part("cu_seqlens", requests + 1),
            start_position=part("start_position", requests),
            tail_len=part("tail_len", requests),
            draft_len=part("draft_len", requests),
            window_floor=part("window_floor", requests),
            write_floor=part("write_floor", requests),
            tail_floor=part("tail_floor", requests),
            samples=buffers["samples"][:requests].astype(np.bool_),
            history_ids=part("history_ids", requests),
            token_ids=part("token_ids", rows),
            positions=part("positions", rows),
            page_deltas=part("page_deltas", int(header[NUM_DELTAS])),
            released_slots=part("released_slots", int(header[NUM_RELEASED])),
        )

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.request_slot)

    @property
    def continues(self) -> NDArray[np.bool_]:
        """[B] whether the request's rows continue its output: the ids before them are in the device's token ring."""
        continues: NDArray[np.bool_] = self.history_ids[:, 0] == FROM_RING
        return continues

    @property
    def row_request(self) -> Array:
        """[T] request of each row."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.cu_seqlens))


class BatchBuilder:
    """Builds the batch of a step; owns the host copy of the page table."""

    def __init__(
        self, config: ModelConfig, layout: KvLayout, *, num_slots: int, num_columns: int
    ) -> None:
        """Sizes of the tables.

        Args:
            config: The model.
            layout: Row sizes and rows per page.
            num_slots: Slots, the padding slot included.
            num_columns: Pages a request can have.
        """
        self._layout = layout
        self._window = config.sliding_window
        self._lookback = config.engram_max_ngram_size
        self._ratios = sorted(set(layout.source_ratios.values()))
        self._page_table = np.zeros((num_slots, num_columns), dtype=np.int64)

    def build(self, plan: PlanView, *, all_logits: bool = False) -> ForwardBatch:
        """The batch of a plan; page-table changes are applied first, in plan order.

        Args:
            plan: The plan.
            all_logits: Logits for every row of the decoder half instead of the sampled ones (parity tool).
        """
        self.write_pages(plan)
        lengths = np.diff(plan.cu_seqlens)
        end = plan.start_position + lengths
        encoder_rows = _Rows(plan.start_position, lengths, plan.window_floor, plan.request_slot)
        floors = row_floors(
            cu_seqlens=plan.cu_seqlens,
            tail_len=plan.tail_len,
            window_floor=plan.window_floor,
            tail_floor=plan.tail_floor,
            write_floor=plan.write_floor,
        )
        encoder = self._row_set(encoder_rows, floors.encoder)
        is_cut = bool(
            (plan.tail_len != lengths).any() or (plan.tail_floor != plan.window_floor).any()
        )
        decoder, tail_rows = encoder, None
        decoder_rows = encoder_rows
        if is_cut:
            decoder_rows = _Rows(
                end - plan.tail_len, plan.tail_len, plan.tail_floor, plan.request_slot
            )
            decoder = self._row_set(decoder_rows, floors.decoder)
            tail_rows = _tensor(
                plan.cu_seqlens[:-1][decoder_rows.request]
                + decoder_rows.position
                - plan.start_position[decoder_rows.request]
            )
        sampled = np.flatnonzero(plan.samples)
        last_rows = np.cumsum(decoder_rows.lengths)[sampled] - 1
        longest = int(end.max()) if len(end) else 0
        return ForwardBatch(
            token_ids=_tensor(plan.token_ids),
            **self._token_indices(plan, encoder_rows, end),
            encoder=encoder,
            decoder=decoder,
            tail_rows=tail_rows,
            compress={
                ratio: self._compress(ratio, plan, encoder_rows, floors.write, end)
                for ratio in self._ratios
            },
            source_index={
                ratio: self._source_index(ratio, plan, end, longest) for ratio in self._ratios
            },
            max_visible={ratio: longest // ratio for ratio in self._ratios},
            logit_rows=torch.arange(decoder.num_rows) if all_logits else _tensor(last_rows),
            sample_index=_tensor(sampled),
            sample_store=_tensor(
                plan.request_slot[sampled] * TOKEN_RING + end[sampled] % TOKEN_RING
            ),
        )

    def write_pages(self, plan: PlanView) -> None:
        """Apply the page-table changes of a plan; `build` does it by itself."""
        deltas = plan.page_deltas
        self._page_table[deltas[:, 0], deltas[:, 1]] = deltas[:, 2]

    def _row_set(self, rows: _Rows, row_floor: Array) -> RowSet:
        """Window keys of each row: k in [max(floor, p - W + 1), p], from the ring before `start`, else from the step."""
        window, ring = self._window, self._layout.window_ring_rows
        context = window - 1
        start, floor, slot = rows.start[:, None], rows.floor[:, None], rows.slot[:, None]
        before = start - context + np.arange(context)
        context_index = np.where(before >= np.maximum(floor, 0), slot * ring + before % ring, -1)
        request = rows.request
        key = rows.position[:, None] - (window - 1) + np.arange(window)
        first = rows.start[request][:, None]
        old = request[:, None] * context + (key - first + context)
        new = rows.num_requests * context + rows.offset[request][:, None] + (key - first)
        index = np.where(key >= first, new, old)
        index[key < row_floor[:, None]] = -1
        end = (rows.start + rows.lengths)[request]
        store = np.where(
            rows.position >= end - ring, rows.slot[request] * ring + rows.position % ring, -1
        )
        return RowSet(
            positions=_tensor(rows.position),
            row_request=_tensor(request),
            window_index=_tensor(index),
            context_index=_tensor(context_index.reshape(-1)),
            window_store=_tensor(store),
            num_visible={ratio: _tensor((rows.position + 1) // ratio) for ratio in self._ratios},
            floor=_tensor(row_floor),
        )

    def _token_indices(self, plan: PlanView, rows: _Rows, end: Array) -> dict[str, Any]:
        """Where ids come from and which go to the token ring."""
        request, position = rows.request, rows.position
        ring_base = plan.request_slot[request] * TOKEN_RING
        back = position[:, None] - np.arange(self._lookback)
        in_step = back >= rows.start[request][:, None]
        step_row = np.arange(len(position))[:, None] - np.arange(self._lookback)
        ring_row = len(position) + ring_base[:, None] + back % TOKEN_RING
        history = np.where(in_step, step_row, ring_row)
        history[back < 0] = -1
        seeds = plan.history_ids
        seed_position = plan.start_position[:, None] - seeds.shape[1] + np.arange(seeds.shape[1])
        seeded = seeds >= 0
        seed_row = plan.request_slot[:, None] * TOKEN_RING + seed_position % TOKEN_RING
        kept = np.flatnonzero(position >= end[request] - TOKEN_RING)
        return {
            "ring_index": _tensor(ring_base + position % TOKEN_RING),
            "history_index": _tensor(history),
            "seed_index": _tensor(seed_row[seeded]),
            "seed_ids": _tensor(seeds[seeded]),
            "ring_rows": _tensor(kept),
            "ring_store": _tensor((ring_base + position % TOKEN_RING)[kept]),
        }

    def _compress(
        self, ratio: int, plan: PlanView, rows: _Rows, write_floor: Array, end: Array
    ) -> CompressRows:
        """Rows that complete a compressed row: every row at ratio 1, odd positions at ratio 2."""
        request, position = rows.request, rows.position
        done = np.flatnonzero((position + 1) % ratio == 0)
        group = position[done] // ratio
        owner = request[done]
        in_step = position[done] - (ratio - 1) >= rows.start[owner]
        slot_base = plan.request_slot[request] * TAIL_RING
        ring_row = len(position) + slot_base[done] + (position[done] - (ratio - 1)) % TAIL_RING
        store = self._pool_rows(ratio, plan.request_slot[owner], group)
        kept = np.flatnonzero(position >= end[request] - TAIL_RING)
        return CompressRows(
            rows=_tensor(done),
            first=_tensor(np.where(in_step, done - (ratio - 1), ring_row)),
            positions=_tensor(group * ratio),
            store=_tensor(np.where(group >= write_floor[done] // ratio, store, -1)),
            tail_rows=_tensor(kept),
            tail_store=_tensor((slot_base + position % TAIL_RING)[kept]),
        )

    def _source_index(self, ratio: int, plan: PlanView, end: Array, longest: int) -> Tensor:
        """[B, N] pool rows of each request's compressed rows; rows past its end point at the dummy page."""
        group = np.arange(longest // ratio)[None, :]
        table = self._pool_rows(ratio, plan.request_slot[:, None], group)
        return _tensor(np.where(group < end[:, None] // ratio, table, 0))

    def _pool_rows(self, ratio: int, slot: Array, group: Array) -> Array:
        per_page = self._layout.page_size // ratio
        return self._page_table[slot, group // per_page] * per_page + group % per_page


class _Rows:
    """Consecutive rows of several requests: where each starts, how many, what its windows may see."""

    def __init__(self, start: Array, lengths: Array, floor: Array, slot: Array) -> None:
        self.start, self.lengths, self.floor, self.slot = start, lengths, floor, slot
        self.num_requests = len(start)
        self.offset = np.cumsum(lengths) - lengths
        self.request = np.repeat(np.arange(self.num_requests), lengths)
        self.position = (
            np.arange(len(self.request)) - self.offset[self.request] + start[self.request]
        )


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
