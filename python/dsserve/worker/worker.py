"""The worker that runs the model: loads it, allocates the pools, runs steps on a stream."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsserve.config.server import ServerConfig
from dsserve.engram.placement import EngramOptions
from dsserve.engram.shared import folder_name
from dsserve.worker.base import (
    STATUS_NAN,
    STATUS_OK,
    AdmittedRequest,
    PlanBuffers,
    Progress,
    StepHandle,
    StepResult,
)
from dsserve.worker.batch import PlanView
from dsserve.worker.parts import load_parts, speculation_settings
from dsserve.worker.runner import Runner, sampled_ids
from dsserve.worker.speculator import (
    SpeculativeStep,
    Speculator,
)
from dsserve.worker.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsserve.models.batch import ForwardBatch
    from dsserve.protocol.engine import EngineConfig
    from dsserve.worker.sampler import Sampler, SamplingRow

logger = logging.getLogger(__name__)


class ModelWorker:
    """Runs the steps of one engine process (`worker.base.Worker`)."""

    def __init__(self, runner: Runner, sampler: Sampler, buffers: list[PlanBuffers]) -> None:
        """Start the stream."""
        self._runner, self._sampler = runner, sampler
        self._buffers = buffers
        self._stream = Stream("forward")

    def buffer_sets(self) -> list[PlanBuffers]:
        """The sets of plan arrays that the scheduler fills."""
        return self._buffers

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Learn the sampling constants of requests that the next plan may hold."""
        self._sampler.admit(requests)

    def launch(self, set_index: int) -> StepHandle:
        """Build the batch on this thread, then queue the forward and the draw."""
        plan = PlanView.of(self._buffers[set_index])
        rows = self._sampler.rows_of(plan.request_id[plan.samples])
        return self._stream.submit(self._step(plan, rows))

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget the sampling state of ended requests."""
        self._sampler.release(request_ids)

    def totals(self) -> dict[str, Any]:
        """Running totals of the model."""
        return {"engram": asdict(self._runner.model.engram_stats)}

    def close(self) -> None:
        """Run what was launched, then end the stream and let go of shared memory."""
        self._stream.close()
        self._runner.model.close()

    def _step(self, plan: PlanView, rows: list[SamplingRow]) -> Callable[[], StepResult]:
        """The host's part of a step; what is left of it runs on the stream."""
        batch = self._runner.prepare(plan)
        return lambda: self._run(plan, batch, rows)

    @torch.inference_mode()
    def _run(self, plan: PlanView, batch: ForwardBatch, rows: list[SamplingRow]) -> StepResult:
        """On the stream: the forward, the draw, the ids for the next step and for the host."""
        started = time.monotonic()
        logits = self._runner.forward(batch)
        status = np.full(plan.num_requests, STATUS_OK, dtype=np.uint8)
        token_ids = np.full(plan.num_requests, -1, dtype=np.int32)
        if rows:
            positions = (plan.start_position + np.diff(plan.cu_seqlens))[plan.samples]
            ids, broken = self._sampler.draw(logits, rows, positions)
            self._runner.keep_sampled(batch, ids)
            token_ids = sampled_ids(plan.num_requests, batch, ids)
            status[np.flatnonzero(plan.samples)[broken.numpy()]] = STATUS_NAN
        finished = time.monotonic()
        return StepResult(plan.step_id, token_ids, status, finished - started, started, finished)


def build_worker(
    config: EngineConfig, capacity: Mapping[str, int], progress: Progress
) -> ModelWorker:
    """Load the model and allocate everything a worker needs.

    Args:
        config: The engine's configuration; `server` is resolved.
        capacity: `Scheduler.plan_capacity()` plus `pages` and `page_size`.
        progress: Told about loading.

    Raises:
        CheckpointError: The checkpoint cannot be used.
    """
    server = ServerConfig.from_dict(config.server)
    device = torch.device("cpu")
    engram = EngramOptions(
        placement=server.engram_placement,
        cache_rows=server.engram_cache_size,
        memory_limit=server.engram_memory_limit,
        folder=folder_name(config.ipc_dir),
    )
    parts = load_parts(server, config.model_path, capacity, progress, device=device, engram=engram)
    draft = parts.runner.model.draft
    if draft is None:
        return ModelWorker(parts.runner, parts.sampler, parts.buffers)
    settings = speculation_settings(server, parts.gamma)
    speculator = Speculator(parts.runner, parts.sampler, draft, settings, device)
    return SpeculativeWorker(parts.runner, parts.sampler, parts.buffers, speculator)


class SpeculativeWorker(ModelWorker):
    """The same with drafts."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        buffers: list[PlanBuffers],
        speculator: Speculator,
    ) -> None:
        """Start the stream."""
        super().__init__(runner, sampler, buffers)
        self._speculator = speculator

    def _step(self, plan: PlanView, rows: list[SamplingRow]) -> Callable[[], StepResult]:
        """See `ModelWorker._step`."""
        step = self._speculator.prepare(plan, rows)
        return lambda: self._run_drafts(step)

    @torch.inference_mode()
    def _run_drafts(self, step: SpeculativeStep) -> StepResult:
        """On the stream: the step, and what the host gets of it."""
        started = time.monotonic()
        result = self._speculator.run(step)
        return self._speculator.fetch(step, result, started)
