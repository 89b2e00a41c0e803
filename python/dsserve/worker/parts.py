"""What every worker has, whatever its device: the model in its runner, a sampler, plan buffers, settings of drafts."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsserve.config.model import load_model_config
from dsserve.errors import ConfigError
from dsserve.speculative.calibrate import read_temperatures
from dsserve.worker.base import NUM_BUFFER_SETS, PlanBuffers, Progress, allocate_plan_buffers
from dsserve.worker.runner import Runner, RunnerSizes, load_model
from dsserve.worker.sampler import Sampler
from dsserve.worker.speculator import SpeculationSettings, longest_block

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsserve.config.model import ModelConfig
    from dsserve.config.server import ServerConfig
    from dsserve.engram.placement import EngramOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker is made of.

    Attributes:
        gamma: Drafts behind the anchor; 0 without speculation.
        context_length: Positions to serve.
    """

    runner: Runner
    sampler: Sampler
    buffers: list[PlanBuffers]
    gamma: int
    context_length: int


def load_parts(
    server: ServerConfig,
    model_path: str,
    capacity: Mapping[str, int],
    progress: Progress,
    *,
    device: torch.device,
    engram: EngramOptions,
) -> WorkerParts:
    """Load the model to a device and allocate what any worker needs.

    Args:
        server: The resolved configuration.
        model_path: The checkpoint.
        capacity: `Scheduler.plan_capacity()` plus `pages` and `page_size`.
        progress: Told about loading.
        device: Where weights, pools and draws are.
        engram: Where the Engram tables lie.

    Raises:
        CheckpointError: The checkpoint cannot be used.
    """
    path = Path(model_path)
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
        device=device,
        load_format=server.load_format,
        seed=server.random_seed or 0,
        progress=lambda done, total, stage: progress(stage, done, total),
        draft=gamma > 0,
        engram=engram,
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
        device=device,
    )
    # What was loaded stays: the collector need not walk it again at every few hundred small objects of a step.
    gc.collect()
    gc.freeze()
    buffers = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
    return WorkerParts(runner, sampler, buffers, gamma, context_length)


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
