"""One forward: a plan in, sampled ids (or raw logits) out. Serving and the parity tool run this same code."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dsserve.engram.hashing import build_engram_constants, load_token_map
from dsserve.engram.placement import check_memory, open_tables
from dsserve.engram.table import table_shapes
from dsserve.errors import CheckpointError
from dsserve.kv.device import DevicePools
from dsserve.kv.layout import TOKEN_RING, kv_layout
from dsserve.models.deepseek_v4.engram_source import row_source
from dsserve.models.deepseek_v4.model import DeepseekV41Model
from dsserve.models.deepseek_v4.weights import Progress, load_weights
from dsserve.worker.batch import BatchBuilder, PlanView
from dsserve_kernels.numerics import BY_NAME
from dsserve_kernels.select import select_operators

if TYPE_CHECKING:
    from pathlib import Path

    from dsserve.config.model import ModelConfig
    from dsserve.engram.placement import EngramOptions
    from dsserve.models.batch import ForwardBatch
    from dsserve.models.deepseek_v4.step import Capture
    from dsserve.replay.prompt_rows import PromptRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    """Sizes of the pools and tables of a runner."""

    page_size: int
    num_pages: int
    num_slots: int
    num_columns: int
    context_length: int


class Runner:
    """Model, pools and batch builder of one engine process."""

    def __init__(self, model: DeepseekV41Model, sizes: RunnerSizes, device: torch.device) -> None:
        """Allocate the pools."""
        layout = kv_layout(model.config, sizes.page_size, draft=model.draft is not None)
        self.model = model
        self.sizes = sizes
        self.pools = DevicePools(
            model.config,
            layout,
            num_pages=sizes.num_pages,
            num_slots=sizes.num_slots,
            device=device,
        )
        self._builder = BatchBuilder(
            model.config, layout, num_slots=sizes.num_slots, num_columns=sizes.num_columns
        )

    def prepare(
        self, plan: PlanView, *, all_logits: bool = False, prompt_rows: PromptRows | None = None
    ) -> ForwardBatch:
        """Host part of a step: page-table changes and index tensors. Called in plan order.

        Args:
            plan: The step.
            all_logits: Logits for every row of the decoder half instead of the sampled ones (parity tool).
            prompt_rows: Rows whose logits are wanted besides; `prompt_rows.split` takes the result apart.
        """
        batch = self._builder.build(plan, all_logits=all_logits)
        if prompt_rows is not None:
            batch = replace(batch, logit_rows=prompt_rows.behind(batch.logit_rows))
        staged = self.model.stage_engram(plan)
        return batch if staged is None else replace(batch, engram=staged)

    def write_pages(self, plan: PlanView) -> None:
        """Host part of a step that the device lays out: page-table changes. Called in plan order."""
        self._builder.write_pages(plan)
        self.model.stage_engram(plan)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, capture: Capture | None = None) -> Tensor:
        """Device part of a step: logits [S, V] float32 of `batch.logit_rows`."""
        return self.model.forward(batch, self.pools, capture)

    @torch.inference_mode()
    def seed_token(self, slot: int, position: int, ids: Tensor) -> None:
        """Put a chosen id where the placeholder at `position` of `slot` reads it (parity tool)."""
        self.pools.token_ring[slot * TOKEN_RING + position % TOKEN_RING] = ids

    @torch.inference_mode()
    def keep_sampled(self, batch: ForwardBatch, ids: Tensor) -> None:
        """Put sampled ids [S] where the next step's placeholders read them."""
        self.pools.token_ring[batch.sample_store] = ids


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    numerics: str,
    context_length: int,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    draft: bool = False,
    engram: EngramOptions | None = None,
) -> DeepseekV41Model:
    """Load a checkpoint and prepare its weights.

    Args:
        path: Checkpoint directory.
        config: Its configuration (overrides applied).
        numerics: `released` or `fp32`.
        context_length: Positions to serve.
        device: Where the weights go.
        load_format: See `weights.load_weights`.
        seed: Of random weights (`--load-format dummy`).
        progress: See `weights.Progress`.
        draft: Load the DSpark head too (`model.draft`).
        engram: Where the Engram tables go; None = with the other weights.

    Raises:
        ConfigError: The Engram tables do not fit into memory.
        CheckpointError: The tokenizer or the weights do not fit the configuration.
    """
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(
            f"{path} has no tokenizer.json: the Engram's vocabulary map is computed from it"
        )
    constants = build_engram_constants(config, load_token_map(tokenizer, config.vocab_size))
    with ExitStack() as stack:
        tables = None
        if engram is not None and config.engram_layer_ids:
            if engram.placement == "device":
                check_memory(table_shapes(config), engram)
            else:
                with row_source(
                    path,
                    config,
                    load_format=load_format,
                    seed=seed,
                    layout=engram.layout,
                    progress=progress,
                ) as source:
                    tables = open_tables(table_shapes(config), engram, source)
                stack.callback(tables.close)
        tensors = load_weights(
            path,
            config,
            load_format=load_format,
            seed=seed,
            progress=progress,
            draft=draft,
            engram_tables=tables is None,
        )
        model = DeepseekV41Model(
            config,
            tensors,
            constants,
            ops=select_operators(device.type, numerics),
            numerics=BY_NAME[numerics],
            context_length=context_length,
            device=device,
            draft=draft,
            engram=tables,
        )
        stack.pop_all()
    return model


def sampled_ids(
    num_requests: int, batch: ForwardBatch, ids: Tensor
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """[B] int32 of a step's ids, -1 where nothing was sampled."""
    result = np.full(num_requests, -1, dtype=np.int32)
    result[batch.sample_index.numpy()] = ids.to(torch.int32).cpu().numpy()
    return result
