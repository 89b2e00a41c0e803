"""Steps with DSpark drafts on a CUDA device: inputs staged, verified and drafted again there, results by event."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dsserve.worker.cuda import CudaWorker
from dsserve.worker.cuda_staging import ALIGNMENT, download
from dsserve.worker.cuda_step import CudaStep

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.worker.base import PlanBuffers, StepResult
    from dsserve.worker.batch import PlanView
    from dsserve.worker.cuda_device import Device
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
    ) -> None:
        """See `CudaWorker`; the speculator leaves its inputs on the host."""
        self._speculator = speculator
        super().__init__(device, runner, sampler, buffers)

    def _launch(self, plan: PlanView, rows: list[SamplingRow], result: Tensor) -> CudaStep:
        started, finished = self._device.event(), self._device.event()
        step = self._speculator.prepare(plan, rows)
        started.record()
        found = self._speculator.run(self._staging.upload(step))
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
