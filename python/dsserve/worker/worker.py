"""The worker that runs the model: loads it, allocates the pools, runs steps on a stream."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsserve.config.model import load_model_config
from dsserve.config.server import ServerConfig
from dsserve.engram.placement import EngramOptions
from dsserve.engram.shared import folder_name
from dsserve.errors import ConfigError
from dsserve.speculative.calibrate import read_temperatures
from dsserve.worker.base import (
    NUM_BUFFER_SETS,
    STATUS_NAN,
    STATUS_OK,
    AdmittedRequest,
    PlanBuffers,
    Progress,
    StepHandle,
    StepResult,
    allocate_plan_buffers,
)
from dsserve.worker.batch import PlanView
from dsserve.worker.runner import Runner, RunnerSizes, load_model, sampled_ids
from dsserve.worker.sampler import Sampler, SamplingRow
from dsserve.worker.speculator import (
    SpeculationSettings,
    SpeculativeStep,
    Speculator,
    longest_block,
)
from dsserve.worker.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsserve.config.model import ModelConfig
    from dsserve.models.batch import ForwardBatch
    from dsserve.protocol.engine import EngineConfig

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
    path = Path(config.model_path)
    model_config = load_model_config(path, server.json_model_override_args)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    context_length = server.context_length or model_config.max_position_embeddings
    gamma = draft_len_of(server, model_config)
    model = load_model(
        path,
        model_config,
        numerics=server.numerics,
        # Steps in flight may run past the last position before their results are seen.
        context_length=context_length + 2 * (gamma + 1) if gamma else context_length,
        device=device,
        load_format=server.load_format,
        seed=server.random_seed or 0,
        progress=lambda done, total, stage: progress(stage, done, total),
        draft=gamma > 0,
        engram=EngramOptions(
            placement=server.engram_placement,
            cache_rows=server.engram_cache_size,
            memory_limit=server.engram_memory_limit,
            folder=folder_name(config.ipc_dir),
        ),
    )
    sizes = RunnerSizes(
        page_size=capacity["page_size"],
        num_pages=capacity["pages"],
        num_slots=capacity["slots"],
        num_columns=capacity["columns"],
        context_length=context_length,
    )
    runner = Runner(model, sizes, device)
    sampler = Sampler(
        model.ops,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        random_seed=server.random_seed,
    )
    # What was loaded stays: the collector need not walk it again at every few hundred small objects of a step.
    gc.collect()
    gc.freeze()
    buffers = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
    if model.draft is None:
        return ModelWorker(runner, sampler, buffers)
    settings = speculation_settings(server, gamma)
    speculator = Speculator(runner, sampler, model.draft, settings, device)
    return SpeculativeWorker(runner, sampler, buffers, speculator)


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


def speculation_settings(server: ServerConfig, gamma: int) -> SpeculationSettings:
    """What the flags say of drafts, which is logged."""
    settings = SpeculationSettings(
        gamma=gamma,
        verify=server.speculative_dspark_verify,
        sampling=server.speculative_dspark_sampling,
        is_block=server.speculative_use_block_verification,
        temperatures=(
            read_temperatures(server.speculative_dspark_temperatures, gamma)
            if server.speculative_dspark_temperatures
            else ()
        ),
        cost_table=(
            Path(server.speculative_dspark_cost_table)
            if server.speculative_dspark_cost_table
            else None
        ),
    )
    logger.info(
        "DSpark: %d drafts behind the anchor (--speculative-num-draft-tokens %d), verification %s, sampling %s",
        gamma,
        gamma + 1,
        settings.verify,
        settings.sampling,
    )
    return settings


def draft_len_of(server: ServerConfig, model: ModelConfig) -> int:
    """Drafts behind the anchor; 0 without speculation.

    Raises:
        ConfigError: The rings have no room for so many.
    """
    num_tokens = server.speculative_num_draft_tokens
    if server.speculative_algorithm != "DSPARK" or num_tokens is None:
        return 0
    most = longest_block(model.engram_max_ngram_size)
    if num_tokens - 1 > most:
        raise ConfigError(
            f"--speculative-num-draft-tokens {num_tokens}: at most {most + 1} work in this version",
            param="--speculative-num-draft-tokens",
        )
    return num_tokens - 1
