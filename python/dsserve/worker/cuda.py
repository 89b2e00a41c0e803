"""The worker of a CUDA device: the step loop's thread launches each step on a stream and never waits in between."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsserve.config.env import has_sync_guard
from dsserve.config.model import load_model_config
from dsserve.config.server import ServerConfig
from dsserve.engram.placement import EngramOptions
from dsserve.errors import ConfigError
from dsserve.worker.base import (
    NUM_BUFFER_SETS,
    AdmittedRequest,
    PlanBuffers,
    Progress,
    StepHandle,
    allocate_plan_buffers,
)
from dsserve.worker.batch import PlanView
from dsserve.worker.cuda_device import CudaDevice
from dsserve.worker.cuda_graphs import MAX_TOKENS, DecodeGraphs, decode_buckets, padding_plan
from dsserve.worker.cuda_sampler import DeviceSampler
from dsserve.worker.cuda_staging import StagingRing
from dsserve.worker.cuda_step import CudaStep, DeviceClock
from dsserve.worker.runner import Runner, RunnerSizes, load_model
from dsserve_kernels.torch_device.tables import place_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from dsserve.protocol.engine import EngineConfig
    from dsserve.worker.cuda_device import Device
    from dsserve.worker.cuda_graphs import Bucket

logger = logging.getLogger(__name__)

#: Requests of the largest graph unless a flag says otherwise.
DEFAULT_GRAPH_REQUESTS = 32


class CudaWorker:
    """Runs the steps of one engine process on a device (`worker.base.Worker`)."""

    def __init__(
        self,
        device: Device,
        runner: Runner,
        sampler: DeviceSampler,
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
        most = max(len(buffers[0]["request_id"]), 1)
        self._results = [
            device.pinned(most * 2 * 8).view(torch.int64).view(most, 2) for _ in buffers
        ]
        self._clock = DeviceClock()
        self._graphs = DecodeGraphs(device, runner, self._staging, buckets)
        self._warm_up()

    def buffer_sets(self) -> list[PlanBuffers]:
        """The sets of plan arrays that the scheduler fills."""
        return self._buffers

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Learn the sampling constants of requests that the next plan may hold."""
        self._sampler.admit(requests)

    def launch(self, set_index: int) -> StepHandle:
        """Build the batch, copy it, and put the forward, the draw and the copy of its result on the stream."""
        with torch.inference_mode(), self._device.launching():
            return self._launch(PlanView.of(self._buffers[set_index]), self._results[set_index])

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

    def _launch(self, plan: PlanView, result: Tensor) -> CudaStep:
        started, finished = self._device.event(), self._device.event()
        rows = self._sampler.rows_of(plan.request_id[plan.samples])
        ends = (plan.start_position + np.diff(plan.cu_seqlens))[plan.samples]
        inputs = self._sampler.inputs(rows, ends)
        bucket = self._graphs.bucket_of(plan)
        if bucket is None:
            batch = self._runner.prepare(plan)
            started.record()
            placed, placed_inputs = self._staging.upload((batch, inputs))
            logits, store = self._runner.forward(placed), placed.sample_store
        else:
            started.record()
            logits, store, placed_inputs = self._graphs.run(plan, bucket, inputs)
        drawn = result[: len(rows)]
        if rows:
            ids, broken = self._sampler.draw_placed(logits, rows, placed_inputs)
            self._runner.pools.token_ring[store] = ids
            drawn.copy_(torch.stack((ids, broken.long()), dim=1), non_blocking=True)
        finished.record()
        return CudaStep(plan.step_id, plan.samples, drawn, started, finished, self._clock)

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


def build_worker(
    config: EngineConfig, capacity: Mapping[str, int], progress: Progress
) -> CudaWorker:
    """Load the model to the CUDA device and allocate everything a worker needs; see `worker.build_worker`.

    Raises:
        ConfigError: There is no CUDA device, or a setting does not work with one.
        CheckpointError: The checkpoint cannot be used.
    """
    server = ServerConfig.from_dict(config.server)
    device = CudaDevice(is_guarded=has_sync_guard())
    path = Path(config.model_path)
    model_config = load_model_config(path, server.json_model_override_args)
    torch.set_num_threads(1)
    context_length = server.context_length or model_config.max_position_embeddings
    model = load_model(
        path,
        model_config,
        numerics=server.numerics,
        context_length=context_length,
        device=device.torch_device,
        load_format=server.load_format,
        seed=server.random_seed or 0,
        progress=lambda done, total, stage: progress(stage, done, total),
        engram=_engram_options(server),
    )
    sizes = RunnerSizes(
        page_size=capacity["page_size"],
        num_pages=capacity["pages"],
        num_slots=capacity["slots"],
        num_columns=capacity["columns"],
        context_length=context_length,
    )
    runner = Runner(model, sizes, device.torch_device)
    sampler = DeviceSampler(
        model.ops,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        random_seed=server.random_seed,
    )
    gc.collect()
    gc.freeze()
    buffers = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
    buckets = _buckets(server, capacity["requests"], context_length)
    worker = CudaWorker(device, runner, sampler, buffers, buckets)
    logger.info(
        "device %s: %s, plain torch operators; guard against waiting %s",
        device.torch_device,
        torch.cuda.get_device_name(device.torch_device),
        "on" if has_sync_guard() else "off",
    )
    return worker


def _buckets(server: ServerConfig, max_requests: int, context_length: int) -> list[Bucket]:
    """What `--cuda-graph-max-bs` asks for."""
    if server.disable_cuda_graph:
        return []
    most = min(server.cuda_graph_max_bs or DEFAULT_GRAPH_REQUESTS, max_requests)
    return decode_buckets(max_requests=most, num_tokens=min(context_length, MAX_TOKENS))


def _engram_options(server: ServerConfig) -> EngramOptions:
    """Tables in device memory, the only place that can be read without the host's help."""
    if server.engram_placement == "sharded" or server.engram_cache_size:
        flag = "--engram-cache-size" if server.engram_cache_size else "--engram-placement"
        raise ConfigError(
            f"{flag}: not yet with --device cuda, where the Engram tables lie in device memory; leave it out",
            param=flag,
        )
    if server.engram_placement != "device":
        logger.info("Engram tables lie in device memory: --device cuda has no other place yet")
    return EngramOptions(placement="device", memory_limit=server.engram_memory_limit)
