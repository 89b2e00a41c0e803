"""Verify steps as CUDA graphs: verification, acceptance, commit and the next drafts of a bucket in one replay."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dsserve.worker.base import PHASE_VERIFY, allocate_plan_buffers
from dsserve.worker.batch import NUM_REQUESTS, NUM_ROWS, PHASE, PlanView
from dsserve.worker.cuda_graphs import NEVER_WRITTEN, Bucket
from dsserve.worker.cuda_staging import packed_bytes
from dsserve.worker.tensor_tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsserve.worker.base import PlanBuffers
    from dsserve.worker.cuda_device import Device
    from dsserve.worker.cuda_staging import StagingRing
    from dsserve.worker.sampler import SamplingRow
    from dsserve.worker.speculator import SpeculativeResult, SpeculativeStep, Speculator

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Graph:
    memory: Tensor
    replay: Callable[[], None]
    result: SpeculativeResult


class VerifyGraphs:
    """The graphs of a speculator; one for greedy requests alone and one for any in each bucket."""

    def __init__(
        self,
        device: Device,
        speculator: Speculator,
        staging: StagingRing,
        buckets: Sequence[Bucket],
    ) -> None:
        """Captures nothing yet; see `DecodeGraphs`."""
        self._device, self._speculator, self._staging = device, speculator, staging
        self._buckets = sorted(buckets)
        self._graphs: dict[tuple[Bucket, bool], _Graph] = {}
        self.num_replays = 0

    def capture(self) -> None:
        """Capture every bucket, the largest first; called before the first step, where waiting does no harm."""
        gamma = self._speculator.settings.gamma
        padding = self._speculator.prepare(PlanView.of(_padding_plan(gamma)), [])
        for bucket in reversed(self._buckets):
            for is_greedy in (True, False):
                step = static_step(padding, bucket, gamma, is_greedy=is_greedy)
                memory = torch.zeros(
                    packed_bytes(step), dtype=torch.uint8, device=self._device.torch_device
                )
                placed = self._staging.upload(step, memory)
                self._run(placed)
                replay, result = self._device.capture(partial(self._run, placed))
                self._graphs[bucket, is_greedy] = _Graph(memory, replay, result)
        if self._buckets:
            logger.info(
                "captured verify graphs of %s requests, %d drafts each, up to %d tokens",
                ", ".join(str(bucket.num_requests) for bucket in self._buckets),
                gamma,
                self._buckets[0].num_tokens,
            )

    def bucket_of(self, step: SpeculativeStep, rows: Sequence[SamplingRow]) -> Bucket | None:
        """The smallest bucket that a step fits; None if it must run eagerly."""
        plan, gamma = step.plan, self._speculator.settings.gamma
        is_plain = (
            plan.phase == PHASE_VERIFY
            and step.budget is None
            and bool(plan.continues.all())
            and step.table.simulated is None
            and not any(row.changes_logits for row in rows)
        )
        if not is_plain:
            return None
        # The spare request (`static_step`) begins at position 0.
        num_spare = plan.num_requests * gamma - int(plan.draft_len.sum())
        longest = max(step.inputs.max_len, num_spare)
        for bucket in self._buckets:
            if (
                bucket.num_requests >= plan.num_requests
                and bucket.num_tokens >= longest
                and _num_deltas(bucket) >= len(plan.page_deltas)
            ):
                return bucket
        return None

    def run(self, step: SpeculativeStep, bucket: Bucket) -> SpeculativeResult:
        """Replay a graph; the result is valid until the next replay, and has confidences of all requests."""
        gamma, is_greedy = self._speculator.settings.gamma, step.table.is_greedy
        graph = self._graphs[bucket, is_greedy]
        self._staging.upload(static_step(step, bucket, gamma, is_greedy=is_greedy), graph.memory)
        graph.replay()
        self.num_replays += 1
        count = step.plan.num_requests
        return map_tensors(graph.result, lambda tensor: tensor[:count])

    def _run(self, step: SpeculativeStep) -> SpeculativeResult:
        """The padding slot begins at position 0 each time: nobody else sets its length back."""
        self._speculator.relay.committed_len[:1].zero_()
        return self._speculator.run(step)


def static_step(
    step: SpeculativeStep, bucket: Bucket, gamma: int, *, is_greedy: bool
) -> SpeculativeStep:
    """A VERIFY step in the shapes of a bucket: behind its own requests, requests of the padding slot.

    A graph has rows for whole blocks. Where a request has fewer drafts, its block is cut, and the rows that become free
    go to one more request, the spare one, which is the last and has no row if no block is cut. So a request's own rows,
    its end and its limit are those of the eager step, and with them what it accepts, sees and leaves in pages, rings and
    tails. The spare request writes what any padding request writes: rings and tails of slot 0, no page (it lies below
    its write floor). Its positions, 0 and up, are in all tables (`VerifyGraphs.bucket_of`).

    All requests of the bucket get new drafts, also those that want none. They go to the relay row and to the token ring
    of the request's own slot, behind the anchor, where only drafts of its next step would be read: it has none.
    """
    plan, inputs, table = step.plan, step.inputs, step.table
    own = plan.request_slot > 0
    count, num_own_rows = int(own.sum()), int(np.diff(plan.cu_seqlens)[own].sum())
    missing = bucket.num_requests + 1 - count
    num_rows = bucket.num_requests * (gamma + 1)

    def pad(tensor: Tensor, value: float, entries: int = missing, kept: int = count) -> Tensor:
        tail = tensor.new_full((entries, *tensor.shape[1:]), value)
        return torch.cat((tensor[:kept], tail))

    lengths = pad(inputs.lengths, gamma + 1)
    lengths[-1] = num_rows - num_own_rows - (missing - 1) * (gamma + 1)
    deltas = step.page_deltas
    return replace(
        step,
        page_deltas=pad(deltas, 0, _num_deltas(bucket) - len(deltas), len(deltas)),
        batch=None,
        inputs=replace(
            inputs,
            slots=pad(inputs.slots, 0),
            start=pad(inputs.start, 0),
            lengths=lengths,
            tail_len=lengths,
            from_relay=pad(inputs.from_relay, True),
            window_floor=pad(inputs.window_floor, 0),
            write_floor=pad(inputs.write_floor, NEVER_WRITTEN),
            tail_floor=pad(inputs.tail_floor, 0),
            token_ids=pad(inputs.token_ids, -1, num_rows - num_own_rows, num_own_rows),
            seed_ids=pad(inputs.seed_ids, -2),
            sampled=torch.arange(bucket.num_requests + 1),
            num_rows=num_rows,
            num_tail_rows=num_rows,
            max_len=bucket.num_tokens,
            is_cut=True,
            is_verify=True,
        ),
        table=replace(
            table,
            rows=[],
            numbers=pad(table.numbers, 0),
            top_k=pad(table.top_k, 1),
            seed=pad(table.seed, 0),
            is_greedy=is_greedy,
            penalised=None,
            simulated=None,
        ),
        floors=pad(step.floors, 0),
        limits=pad(step.limits, gamma),
        drafting=torch.arange(bucket.num_requests),
    )


def _num_deltas(bucket: Bucket) -> int:
    """Page-table changes that a graph has room for."""
    return 2 * bucket.num_requests + 8


def _padding_plan(gamma: int) -> PlanBuffers:
    """A VERIFY step of the padding slot; no request of it is sampled."""
    rows = gamma + 1
    plan = allocate_plan_buffers({"requests": 1, "rows": rows, "deltas": 1, "slots": 1})
    plan["header"][PHASE] = PHASE_VERIFY
    plan["header"][NUM_REQUESTS], plan["header"][NUM_ROWS] = 1, rows
    plan["cu_seqlens"][1] = plan["tail_len"][0] = rows
    plan["draft_len"][0] = gamma
    plan["history_ids"][:] = -2
    return plan
