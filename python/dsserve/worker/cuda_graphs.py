"""Decode steps as CUDA graphs: steps of few requests are padded to a bucket and replayed with changed inputs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsserve.worker.base import PHASE_DECODE, allocate_plan_buffers
from dsserve.worker.batch import NUM_REQUESTS, NUM_ROWS, PHASE, PlanView
from dsserve.worker.cuda_staging import packed_bytes
from dsserve.worker.runner import Runner
from dsserve.worker.tensor_tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from dsserve.models.batch import CompressRows, ForwardBatch
    from dsserve.worker.base import PlanBuffers
    from dsserve.worker.cuda_device import Device
    from dsserve.worker.cuda_staging import StagingRing

logger = logging.getLogger(__name__)

#: Tokens up to which graphs cover a context unless it is shorter; longer steps run eagerly.
MAX_TOKENS = 4096
#: Room behind a graph's inputs for what the draw of the step is told (bytes).
DRAW_BYTES = 1 << 16
#: A padding row lies below every position that may be written.
NEVER_WRITTEN = 1 << 40


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Shapes of a graph: requests with one row each, and tokens of the longest."""

    num_requests: int
    num_tokens: int


def decode_buckets(*, max_requests: int, num_tokens: int) -> list[Bucket]:
    """Buckets with 1, 2, 4, .. requests, the last with `max_requests`."""
    sizes = [1 << power for power in range(max_requests.bit_length())]
    return [Bucket(size, num_tokens) for size in sorted({*sizes, max_requests}) if size > 0]


@dataclass(slots=True)
class _Graph:
    """A captured forward: its inputs are packed at the beginning of `memory`, its logits fill `logits`."""

    memory: Tensor
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """The graphs of a runner. All calls are made where steps are launched."""

    def __init__(
        self,
        device: Device,
        runner: Runner,
        staging: StagingRing,
        buckets: Sequence[Bucket],
    ) -> None:
        """Captures nothing yet.

        Args:
            device: Where the runner is.
            runner: Prepares and runs steps.
            staging: Brings inputs to the device.
            buckets: Shapes to capture.
        """
        self._device, self._runner, self._staging = device, runner, staging
        self._buckets = sorted(buckets)
        self._graphs: dict[Bucket, _Graph] = {}
        self.num_replays = 0

    def capture(self, padding: PlanView) -> None:
        """Capture every bucket, the largest first; called before the first step, where waiting does no harm.

        Args:
            padding: A step of one row of the padding slot.
        """
        for bucket in reversed(self._buckets):
            batch = _unsampled(self._prepare(padding, bucket))
            size = packed_bytes(batch) + DRAW_BYTES
            memory = torch.zeros(size, dtype=torch.uint8, device=self._device.torch_device)
            placed = self._staging.upload(batch, memory)
            self._runner.forward(placed)
            replay, logits = self._device.capture(partial(self._runner.forward, placed))
            self._graphs[bucket] = _Graph(memory, replay, logits)
        if self._buckets:
            shapes = ", ".join(str(bucket.num_requests) for bucket in self._buckets)
            logger.info(
                "captured decode graphs of %s requests, up to %d tokens each",
                shapes,
                self._buckets[0].num_tokens,
            )

    def bucket_of(self, plan: PlanView) -> Bucket | None:
        """The smallest bucket that the plan fits; None if it must run eagerly."""
        count = plan.num_requests
        if plan.phase != PHASE_DECODE or len(plan.token_ids) != count or not plan.samples.all():
            return None
        longest = int(plan.start_position.max(initial=0)) + 1
        for bucket in self._buckets:
            if bucket.num_requests >= count and bucket.num_tokens >= longest:
                return bucket if bucket in self._graphs else None
        return None

    def run(self, plan: PlanView, bucket: Bucket, told: Any) -> tuple[Tensor, Tensor, Any]:
        """Replay a graph for a plan.

        Args:
            plan: Fits the bucket.
            bucket: From `bucket_of`.
            told: Host tensors that the draw needs.

        Returns:
            Logits [B, V] float32, valid until the next replay; ring rows of the tokens to draw [B]; `told` on the
            device.
        """
        graph = self._graphs[bucket]
        batch = self._prepare(plan, bucket)
        inputs, extra = _unsampled(batch), (batch.sample_store, told)
        if packed_bytes((inputs, extra)) <= graph.memory.shape[0]:
            _, (store, told) = self._staging.upload((inputs, extra), graph.memory)
        else:
            self._staging.upload(inputs, graph.memory)
            store, told = self._staging.upload(extra)
        graph.replay()
        self.num_replays += 1
        return graph.logits[: plan.num_requests], store, told

    def _prepare(self, plan: PlanView, bucket: Bucket) -> ForwardBatch:
        stats = self._runner.model.engram_stats
        before = stats.rows
        # The host's batch, also of a runner that places batches itself.
        batch = Runner.prepare(self._runner, padded_plan(plan, bucket.num_requests))
        # Rows of the padding slot are no look-ups of a request.
        own = int((plan.request_slot > 0).sum())
        stats.rows = before + (stats.rows - before) * own // bucket.num_requests
        return static_batch(batch, bucket)


def padding_plan() -> PlanBuffers:
    """A decode step of one row of the padding slot, which may always run."""
    plan = allocate_plan_buffers({"requests": 1, "rows": 1, "deltas": 1, "slots": 1})
    plan["header"][PHASE] = PHASE_DECODE
    plan["header"][NUM_REQUESTS] = plan["header"][NUM_ROWS] = 1
    plan["cu_seqlens"][1] = plan["tail_len"][0] = plan["samples"][0] = 1
    plan["history_ids"][:] = -2
    return plan


def padded_plan(plan: PlanView, num_requests: int) -> PlanView:
    """A decode plan with rows of the padding slot behind its own; they draw nothing and write nothing shared."""
    missing = num_requests - plan.num_requests
    special = {
        "cu_seqlens": np.arange(num_requests + 1),
        "tail_len": np.ones(num_requests, dtype=np.int64),
        "write_floor": _with(plan.write_floor, missing, NEVER_WRITTEN),
        "history_ids": _with(plan.history_ids, missing, -2),
        "page_deltas": plan.page_deltas,
        "released_slots": plan.released_slots,
    }
    values = {}
    for field in fields(PlanView):
        value = getattr(plan, field.name)
        if field.name in special:
            value = special[field.name]
        elif isinstance(value, np.ndarray):
            value = _with(value, missing, 0)
        values[field.name] = value
    return PlanView(**values)


def _with(array: Any, count: int, value: int) -> Any:
    """The array with `count` entries of a value behind it."""
    tail = np.full((count, *array.shape[1:]), value, dtype=array.dtype)
    return np.concatenate((array, tail))


def static_batch(batch: ForwardBatch, bucket: Bucket) -> ForwardBatch:
    """The same step in the shapes of a bucket: nothing depends on positions, floors or who is sampled.

    Both halves have row sets of their own, every row has its place in the compressed rows (-1 where it completes none),
    and lists of compressed rows have the length of the bucket's longest context.
    """
    rows = torch.arange(bucket.num_requests)
    return replace(
        batch,
        # Copies, because what two row sets share would be packed once.
        decoder=map_tensors(batch.decoder, torch.clone),
        tail_rows=rows,
        compress={ratio: _every_row(plan, rows) for ratio, plan in batch.compress.items()},
        source_index={
            ratio: _widened(index, bucket.num_tokens // ratio)
            for ratio, index in batch.source_index.items()
        },
        max_visible={ratio: bucket.num_tokens // ratio for ratio in batch.max_visible},
        logit_rows=rows,
    )


def _unsampled(batch: ForwardBatch) -> ForwardBatch:
    """Without the tensors whose length is that of the sampled requests."""
    none = batch.sample_index[:0]
    return replace(batch, sample_index=none, sample_store=none)


def _every_row(plan: CompressRows, rows: Tensor) -> CompressRows:
    """An entry for each row; those that complete nothing store nothing."""

    def spread(values: Tensor, default: Tensor) -> Tensor:
        result = default.clone()
        result[plan.rows] = values
        return result

    return replace(
        plan,
        rows=rows,
        first=spread(plan.first, rows),
        positions=spread(plan.positions, torch.zeros_like(rows)),
        store=spread(plan.store, torch.full_like(rows, -1)),
    )


def _widened(index: Tensor, length: int) -> Tensor:
    """[B, n] -> [B, length]; what is added points at the dummy page."""
    return torch.nn.functional.pad(index, (0, length - index.shape[1]))
