"""Steps with DSpark drafts on a CUDA device: inputs staged, verified and drafted again there, results by event."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from dsserve.worker.cuda import CudaWorker
from dsserve.worker.cuda_staging import ALIGNMENT, download
from dsserve.worker.cuda_step import CudaStep
from dsserve.worker.cuda_verify_graphs import VerifyGraphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dsserve.worker.base import PlanBuffers, StepResult
    from dsserve.worker.batch import PlanView
    from dsserve.worker.cuda_device import Device
    from dsserve.worker.cuda_graphs import Bucket
    from dsserve.worker.runner import Runner
    from dsserve.worker.sampler import Sampler, SamplingRow
    from dsserve.worker.speculator import SpeculativeResult, SpeculativeStep, Speculator


class CudaSpeculativeWorker(CudaWorker):
    """The CUDA worker of a model with a draft head."""

    def __init__(
        self,
        device: Device,
        runner: Runner,
        sampler: Sampler,
        buffers: list[PlanBuffers],
        speculator: Speculator,
        buckets: Sequence[Bucket] = (),
    ) -> None:
        """See `CudaWorker`; the speculator leaves its inputs on the host."""
        self._speculator = speculator
        super().__init__(device, runner, sampler, buffers)
        self._verify_graphs = VerifyGraphs(device, speculator, self._staging, buckets)
        with torch.inference_mode(), device.launching(is_setup=True):
            self._verify_graphs.capture()
        device.synchronize()

    @property
    def num_replays(self) -> int:
        """Steps that ran as graphs."""
        return self._verify_graphs.num_replays

    def _launch(self, plan: PlanView, rows: list[SamplingRow], result: Tensor) -> CudaStep:
        started, finished = self._device.event(), self._device.event()
        step = self._speculator.prepare(plan, rows)
        bucket = self._verify_graphs.bucket_of(step, rows)
        started.record()
        if bucket is None:
            found = self._speculator.run(self._staging.upload(step))
        else:
            found = self._verify_graphs.run(step, bucket)
        host = download(found, result)
        finished.record()
        return CudaStep(started, finished, partial(self._read, step, host), self._clock)

    def _read(
        self, step: SpeculativeStep, host: SpeculativeResult, started_s: float, finished_s: float
    ) -> StepResult:
        return self._speculator.fetch(step, host, started_s, finished_s)

    def _result_bytes(self) -> int:
        """A run of ids, three numbers and the confidences."""
        gamma = self._speculator.settings.gamma
        return (gamma + 4) * 8 + gamma * 4 + 5 * ALIGNMENT
