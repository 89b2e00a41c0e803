"""Index tensors of steps whose positions only the device knows: torch operations on relay buffers and page table.

A step that follows one with drafts cannot be laid out by the host (`worker/batch.py`): how many drafts were accepted is
known when it runs. Its shapes, B requests and T rows, are known all the same. So every tensor here has a static shape:
rows that complete no compressed row, or whose ids no ring keeps, are there too and go nowhere (-1) or to the padding
slot. Nothing is read back to the host, and there is no loop over requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dsserve.kv.layout import TAIL_RING, TOKEN_RING, KvLayout
from dsserve.models.batch import CompressRows, ForwardBatch, RowSet
from dsserve.worker.base import PHASE_VERIFY
from dsserve.worker.relay import Relay, ring_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsserve.config.model import ModelConfig
    from dsserve.worker.batch import PlanView


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the host says of a step; tensors int64 on the device, B requests, T rows.

    Attributes:
        slots: [B].
        start: [B] first position of requests whose rows are a prompt's.
        lengths: [B] rows.
        tail_len: [B] last rows that run the decoder half.
        from_relay: [B] bool: the rows continue the output; their start and their ids come from the device.
        window_floor: [B].
        write_floor: [B].
        tail_floor: [B].
        token_ids: [T], -1 where the token ring has them.
        seed_ids: [B, n] ids before `start`, negative = none.
        sampled: [S] requests that sample.
        num_rows: T.
        num_tail_rows: Rows of the decoder half.
        max_len: No position of the step lies at or beyond it.
        is_cut: Whether the decoder half has other rows or floors than the encoder half.
        is_verify: Every row is sampled; otherwise the last one of each request in `sampled`.
    """

    slots: Tensor
    start: Tensor
    lengths: Tensor
    tail_len: Tensor
    from_relay: Tensor
    window_floor: Tensor
    write_floor: Tensor
    tail_floor: Tensor
    token_ids: Tensor
    seed_ids: Tensor
    sampled: Tensor
    num_rows: int
    num_tail_rows: int
    max_len: int
    is_cut: bool
    is_verify: bool

    @classmethod
    def of(cls, plan: PlanView, device: torch.device) -> StepInputs:
        """The inputs of a plan, on their way to the device."""

        def put(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        lengths = np.diff(plan.cu_seqlens)
        continues = plan.continues
        token_ids = plan.token_ids.copy()
        token_ids[continues[plan.row_request]] = -1
        is_cut = (plan.tail_len != lengths).any() or (plan.tail_floor != plan.window_floor).any()
        return cls(
            slots=put(plan.request_slot),
            start=put(plan.start_position),
            lengths=put(lengths),
            tail_len=put(plan.tail_len),
            from_relay=put(continues),
            window_floor=put(plan.window_floor),
            write_floor=put(plan.write_floor),
            tail_floor=put(plan.tail_floor),
            token_ids=put(token_ids),
            seed_ids=put(plan.history_ids),
            sampled=put(np.flatnonzero(plan.samples)),
            num_rows=len(token_ids),
            num_tail_rows=int(plan.tail_len.sum()),
            max_len=int((plan.start_position + lengths).max(initial=0)),
            is_cut=bool(is_cut),
            is_verify=plan.phase == PHASE_VERIFY,
        )

    def with_drafts(self, num_drafts: Tensor, total: int) -> StepInputs:
        """The same VERIFY step with fewer drafts: [B], `total` in all."""
        lengths, num_rows = num_drafts + 1, num_drafts.shape[0] + total
        return replace(
            self,
            lengths=lengths,
            tail_len=lengths,
            token_ids=self.token_ids[:num_rows],
            num_rows=num_rows,
            num_tail_rows=num_rows,
        )


class DeviceBatchBuilder:
    """Builds `ForwardBatch` on the device from relay buffers."""

    def __init__(self, config: ModelConfig, layout: KvLayout, relay: Relay) -> None:
        """Keep the sizes."""
        self._layout, self._relay = layout, relay
        self._window = config.sliding_window
        self._lookback = config.engram_max_ngram_size
        self._ratios = sorted(set(layout.source_ratios.values()))

    def build(self, inputs: StepInputs) -> ForwardBatch:
        """The batch of a step; runs in step order on the stream."""
        committed = self._relay.committed_len[inputs.slots]
        start = torch.where(inputs.from_relay, committed, inputs.start)
        end = start + inputs.lengths
        rows = _Rows(inputs, start, inputs.lengths, inputs.window_floor, inputs.num_rows)
        encoder = decoder = self._row_set(rows)
        decoder_rows, tail_rows = rows, None
        if inputs.is_cut:
            decoder_rows = _Rows(
                inputs,
                end - inputs.tail_len,
                inputs.tail_len,
                inputs.tail_floor,
                inputs.num_tail_rows,
            )
            decoder = self._row_set(decoder_rows)
            tail_rows = decoder_rows.position + (rows.offset - start)[decoder_rows.request]
        if inputs.is_verify:
            logit_rows = torch.arange(inputs.num_tail_rows, device=start.device)
        else:
            logit_rows = (decoder_rows.offset + decoder_rows.lengths - 1)[inputs.sampled]
        longest = inputs.max_len
        return ForwardBatch(
            token_ids=inputs.token_ids,
            **self._token_indices(inputs, rows, start, end),
            encoder=encoder,
            decoder=decoder,
            tail_rows=tail_rows,
            compress={ratio: self._compress(ratio, inputs, rows, end) for ratio in self._ratios},
            source_index={
                ratio: self._source_index(ratio, inputs, end, longest) for ratio in self._ratios
            },
            max_visible={ratio: longest // ratio for ratio in self._ratios},
            logit_rows=logit_rows,
            sample_index=inputs.sampled,
            sample_store=inputs.sampled,
        )

    def _row_set(self, rows: _Rows) -> RowSet:
        """As `BatchBuilder._row_set`: k in [max(floor, p - W + 1), p], from the ring before `start`, else from the step."""
        window, ring = self._window, self._layout.window_ring_rows
        device = rows.position.device
        context = window - 1
        start, floor = rows.start.unsqueeze(1), rows.floor.clamp_min(0).unsqueeze(1)
        before = start - context + torch.arange(context, device=device)
        old_rows = rows.slot.unsqueeze(1) * ring + before % ring
        context_index = torch.where(before >= floor, old_rows, -1)
        request = rows.request
        key = rows.position.unsqueeze(1) + torch.arange(1 - window, 1, device=device)
        first = start[request]
        old = request.unsqueeze(1) * context + (key - first + context)
        new = rows.start.shape[0] * context + rows.offset[request].unsqueeze(1) + (key - first)
        row_floor = floor[request]
        index = torch.where(key >= first, new, old).masked_fill(key < row_floor, -1)
        end = (rows.start + rows.lengths)[request]
        own_rows = rows.slot[request] * ring + rows.position % ring
        return RowSet(
            positions=rows.position,
            row_request=request,
            window_index=index,
            context_index=context_index.view(-1),
            window_store=torch.where(rows.position >= end - ring, own_rows, -1),
            num_visible={ratio: (rows.position + 1) // ratio for ratio in self._ratios},
            floor=row_floor.squeeze(1),
        )

    def _token_indices(
        self, inputs: StepInputs, rows: _Rows, start: Tensor, end: Tensor
    ) -> dict[str, Any]:
        """Where ids come from and which go to the token ring."""
        request, position = rows.request, rows.position
        device = position.device
        slot = inputs.slots[request]
        offsets = torch.arange(self._lookback, device=device)
        back = position.unsqueeze(1) - offsets
        row = torch.arange(inputs.num_rows, device=device)
        in_ring = inputs.num_rows + ring_rows(slot.unsqueeze(1), back)
        history = torch.where(
            back >= start[request].unsqueeze(1), row.unsqueeze(1) - offsets, in_ring
        )
        num_seeds = inputs.seed_ids.shape[1]
        seed_position = start.unsqueeze(1) + torch.arange(-num_seeds, 0, device=device)
        is_seed = inputs.seed_ids >= 0
        seed_slot = torch.where(is_seed, inputs.slots.unsqueeze(1), 0)
        is_kept = position >= end[request] - TOKEN_RING
        return {
            "ring_index": ring_rows(slot, position),
            "history_index": history.masked_fill(back < 0, -1),
            "seed_index": ring_rows(seed_slot, seed_position).view(-1),
            "seed_ids": inputs.seed_ids.clamp_min(0).view(-1),
            "ring_rows": row,
            "ring_store": ring_rows(torch.where(is_kept, slot, 0), position),
        }

    def _compress(self, ratio: int, inputs: StepInputs, rows: _Rows, end: Tensor) -> CompressRows:
        """Every row, stored where it completes a compressed one."""
        request, position = rows.request, rows.position
        row = torch.arange(inputs.num_rows, device=position.device)
        slot = inputs.slots[request]
        back = position - (ratio - 1)
        in_step = back >= rows.start[request]
        in_tail = inputs.num_rows + slot * TAIL_RING + back % TAIL_RING
        group = position // ratio
        is_written = (position + 1) % ratio == 0
        is_written &= group >= inputs.write_floor[request] // ratio
        is_kept = position >= end[request] - TAIL_RING
        return CompressRows(
            rows=row,
            first=torch.where(in_step, row - (ratio - 1), in_tail),
            positions=group * ratio,
            store=torch.where(is_written, self._pool_rows(ratio, slot, group), -1),
            tail_rows=row,
            tail_store=torch.where(is_kept, slot, 0) * TAIL_RING + position % TAIL_RING,
        )

    def _source_index(self, ratio: int, inputs: StepInputs, end: Tensor, longest: int) -> Tensor:
        """[B, N] pool rows of each request's compressed rows; rows past its end point at the dummy page."""
        group = torch.arange(longest // ratio, device=end.device).unsqueeze(0)
        table = self._pool_rows(ratio, inputs.slots.unsqueeze(1), group)
        return torch.where(group < (end // ratio).unsqueeze(1), table, 0)

    def _pool_rows(self, ratio: int, slot: Tensor, group: Tensor) -> Tensor:
        per_page = self._layout.page_size // ratio
        page = self._relay.page_table[slot, group // per_page]
        return page * per_page + group % per_page


class _Rows:
    """Consecutive rows of several requests, `num_rows` in all."""

    def __init__(
        self, inputs: StepInputs, start: Tensor, lengths: Tensor, floor: Tensor, num_rows: int
    ) -> None:
        self.start, self.lengths, self.floor, self.slot = start, lengths, floor, inputs.slots
        self.offset = lengths.cumsum(0) - lengths
        requests = torch.arange(lengths.shape[0], device=lengths.device)
        self.request = requests.repeat_interleave(lengths, output_size=num_rows)
        row = torch.arange(num_rows, device=lengths.device)
        self.position = row + (start - self.offset)[self.request]
