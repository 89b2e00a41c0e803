"""Builds the worker of a CUDA device: model to the device, pools, graphs, with or without drafts."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsserve.config.env import has_sync_guard
from dsserve.config.model import load_model_config
from dsserve.config.server import ServerConfig
from dsserve.engram.placement import EngramOptions
from dsserve.errors import ConfigError
from dsserve.worker.base import NUM_BUFFER_SETS, Progress, allocate_plan_buffers
from dsserve.worker.cuda import CudaWorker
from dsserve.worker.cuda_device import CudaDevice
from dsserve.worker.cuda_graphs import MAX_TOKENS, Bucket, decode_buckets
from dsserve.worker.cuda_speculation import CudaSpeculativeWorker
from dsserve.worker.runner import Runner, RunnerSizes, load_model
from dsserve.worker.sampler import Sampler
from dsserve.worker.speculator import Speculator
from dsserve.worker.worker import draft_len_of, speculation_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsserve.protocol.engine import EngineConfig

logger = logging.getLogger(__name__)

#: Requests of the largest graph unless a flag says otherwise.
DEFAULT_GRAPH_REQUESTS = 32
_HOST = torch.device("cpu")


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
    gamma = draft_len_of(server, model_config)
    model = load_model(
        path,
        model_config,
        numerics=server.numerics,
        # Steps in flight may run past the last position before their results are seen.
        context_length=context_length + 2 * (gamma + 1) if gamma else context_length,
        device=device.torch_device,
        load_format=server.load_format,
        seed=server.random_seed or 0,
        progress=lambda done, total, stage: progress(stage, done, total),
        draft=gamma > 0,
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
    sampler = Sampler(
        model.ops,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        random_seed=server.random_seed,
        device=device.torch_device,
    )
    gc.collect()
    gc.freeze()
    buffers = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
    buckets = _buckets(server, capacity["requests"], context_length)
    if model.draft is None:
        worker = CudaWorker(device, runner, sampler, buffers, buckets)
    else:
        settings = speculation_settings(server, gamma)
        speculator = Speculator(
            runner, sampler, model.draft, settings, device.torch_device, inputs_on=_HOST
        )
        worker = CudaSpeculativeWorker(device, runner, sampler, buffers, speculator, buckets)
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
