"""Builds the worker of a CUDA device: model to the device, pools, graphs, with or without drafts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from dsserve.config.env import has_sync_guard
from dsserve.config.server import ServerConfig
from dsserve.engram.placement import EngramOptions
from dsserve.errors import ConfigError
from dsserve.worker.cuda import CudaWorker
from dsserve.worker.cuda_device import CudaDevice
from dsserve.worker.cuda_graphs import MAX_TOKENS, Bucket, decode_buckets
from dsserve.worker.cuda_speculation import CudaSpeculativeWorker
from dsserve.worker.parts import load_parts, speculation_settings
from dsserve.worker.speculator import Speculator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsserve.protocol.engine import EngineConfig
    from dsserve.worker.base import Progress

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
    parts = load_parts(
        server,
        config.model_path,
        capacity,
        progress,
        device=device.torch_device,
        engram=_engram_options(server),
    )
    runner, sampler, buffers = parts.runner, parts.sampler, parts.buffers
    buckets = _buckets(server, capacity["requests"], parts.context_length)
    if runner.model.draft is None:
        worker = CudaWorker(device, runner, sampler, buffers, buckets)
    else:
        settings = speculation_settings(server, parts.gamma)
        speculator = Speculator(
            runner, sampler, runner.model.draft, settings, device.torch_device, inputs_on=_HOST
        )
        if settings.is_scheduled:
            buckets = []  # steps with a budget of drafts run eagerly
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
