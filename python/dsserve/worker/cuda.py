"""The worker of a CUDA device: the step loop's thread launches each step on a stream and never waits in between."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsserve.worker.base import (
    NUM_BUFFER_SETS,
    AdmittedRequest,
    PlanBuffers,
    StepHandle,
)
from dsserve.worker.batch import PlanView
from dsserve.worker.cuda_graphs import DecodeGraphs, padding_plan
from dsserve.worker.cuda_staging import StagingRing
from dsserve.worker.cuda_step import CudaStep, DeviceClock, DrawnIds
from dsserve.worker.sampler import RunRows, Sampler, SamplingTable
from dsserve_kernels.torch_device.tables import place_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dsserve.worker.cuda_device import Device
    from dsserve.worker.cuda_graphs import Bucket
    from dsserve.worker.runner import Runner
    from dsserve.worker.sampler import SamplingRow

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
#: An id and a flag for each sampled request.
_DRAWN_BYTES = 16


class CudaWorker:
    """Runs the steps of one engine process on a device (`worker.base.Worker`)."""

    def __init__(
        self,
        device: Device,
        runner: Runner,
        sampler: Sampler,
        buffers: list[PlanBuffers],
        buckets: Sequence[Bucket] = (),
    ) -> None:
        """Allocate the buffers of the steps in flight, capture graphs.

        Args:
            device: Where the runner's weights and pools are.
            runner: The model.
            sampler: Draws on the device.
            buffers: Sets of plan arrays.
            buckets: Shapes of decode steps that are captured as graphs.
        """
        self._device, self._runner, self._sampler = device, runner, sampler
        self._buffers = buffers
        self._staging = StagingRing(device, NUM_BUFFER_SETS)
        most = max(len(buffers[0]["request_id"]), 1) * self._result_bytes()
        self._results = [device.pinned(most) for _ in buffers]
        self._clock = DeviceClock()
        self._graphs = DecodeGraphs(device, runner, self._staging, buckets)
        self._warm_up()

    def buffer_sets(self) -> list[PlanBuffers]:
        """The sets of plan arrays that the scheduler fills."""
        return self._buffers

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Learn the sampling constants of requests that the next plan may hold."""
        with torch.inference_mode(), self._device.launching():
            self._sampler.admit(requests)

    def launch(self, set_index: int) -> StepHandle:
        """Build the batch, copy it, and put the forward, the draw and the copy of its result on the stream."""
        with torch.inference_mode(), self._device.launching():
            plan = PlanView.of(self._buffers[set_index])
            rows = self._sampler.rows_of(plan.request_id[plan.samples])
            return self._launch(plan, rows, self._results[set_index])

    @property
    def num_replays(self) -> int:
        """Steps that ran as graphs."""
        return self._graphs.num_replays

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget the sampling state of ended requests."""
        self._sampler.release(request_ids)

    def totals(self) -> dict[str, Any]:
        """Running totals of the model."""
        return {"engram": asdict(self._runner.model.engram_stats)}

    def close(self) -> None:
        """Wait for what was launched."""
        self._device.synchronize()
        self._runner.model.close()

    def _launch(self, plan: PlanView, rows: list[SamplingRow], result: Tensor) -> CudaStep:
        started, finished = self._device.event(), self._device.event()
        ends = (plan.start_position + np.diff(plan.cu_seqlens))[plan.samples]
        runs = RunRows.single(torch.from_numpy(ends))
        told = SamplingTable.of(rows, _HOST), runs
        bucket = self._graphs.bucket_of(plan)
        if bucket is None:
            batch = self._runner.prepare(plan)
            started.record()
            placed, told = self._staging.upload((batch, told))
            logits, store = self._runner.forward(placed), placed.sample_store
        else:
            started.record()
            logits, store, told = self._graphs.run(plan, bucket, told)
        drawn = result[: len(rows) * _DRAWN_BYTES].view(torch.int64).view(len(rows), 2)
        if rows:
            table, runs = told
            ids, broken = self._sampler.draw_rows(logits, table, runs)
            self._sampler.count(table, ids.unsqueeze(1), torch.ones_like(ids))
            self._runner.pools.token_ring[store] = ids
            drawn.copy_(torch.stack((ids, broken.long()), dim=1), non_blocking=True)
        finished.record()
        return CudaStep(started, finished, DrawnIds(plan.step_id, plan.samples, drawn), self._clock)

    def _result_bytes(self) -> int:
        """Most bytes that one request's part of a result takes."""
        return _DRAWN_BYTES

    def _warm_up(self) -> None:
        """Run steps of the padding slot, so that libraries and tables are set up before the first request."""
        self._device.synchronize()
        with torch.inference_mode(), self._device.launching(is_setup=True):
            place_tables(self._device.torch_device)
            padding = PlanView.of(padding_plan())
            batch = self._runner.prepare(padding)
            self._runner.forward(self._staging.upload(batch)).argmax(1)
            self._graphs.capture(padding)
        self._device.synchronize()
