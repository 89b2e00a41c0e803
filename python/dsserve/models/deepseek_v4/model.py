"""The V4.1 text model: token ids of a step in, logits of its sampled rows out (model.md section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsserve.engram.staging import planned_rows
from dsserve.engram.table import EngramStats
from dsserve.models.deepseek_v4.draft import DraftModel
from dsserve.models.deepseek_v4.engram import DeviceLookup, EngramHash, StagedLookup
from dsserve.models.deepseek_v4.layer import Layer
from dsserve.models.deepseek_v4.params import Params
from dsserve.models.deepseek_v4.rope import RopeTables
from dsserve.models.deepseek_v4.step import Capture, Step

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.engram.hashing import EngramConstants
    from dsserve.engram.placement import OpenTables
    from dsserve.engram.staging import EngramPlan, StagedRows
    from dsserve.kv.device import DevicePools
    from dsserve.models.batch import ForwardBatch
    from dsserve.models.deepseek_v4.engram import EngramLookup, EngramRows
    from dsserve_kernels.numerics import Numerics
    from dsserve_kernels.select import Operators


class DeepseekV41Model:
    """All layers of a text model; holds weights only, no request state.

    Attributes:
        config: The model.
        ops: Operators of every layer.
        numerics: Numeric policy.
        engram_stats: Engram look-ups so far.
        draft: The DSpark head, or None. With one, every forward also writes the window rows that the head sees.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        constants: EngramConstants,
        *,
        ops: Operators,
        numerics: Numerics,
        context_length: int,
        device: torch.device,
        draft: bool = False,
        engram: OpenTables | None = None,
    ) -> None:
        """Prepare all weights.

        Args:
            config: The model.
            tensors: Checkpoint tensors by name (`weights.load_checkpoint`).
            constants: Engram constants of the tokenizer.
            ops: Selected operators.
            numerics: Numeric policy.
            context_length: Positions the rotary tables cover.
            device: Where the weights go.
            draft: Whether the DSpark head runs; `tensors` then holds `mtp.*`.
            engram: Engram tables that are not in the device's memory; None = `tensors` holds them.
        """
        params = Params(tensors, ops, numerics, config.rms_norm_eps, device)
        # The last block of drafts may reach beyond the context.
        num_positions = context_length + (config.dspark_block_size if draft else 0)
        rope = RopeTables(config, num_positions, device)
        self.config, self.numerics = config, numerics
        self.ops = ops
        self._embed = params.raw("embed.weight").to(numerics.act_dtype)
        self._hash = EngramHash(config, constants, params)
        self._constants, self._tables = constants, engram
        self.engram_stats = EngramStats("device") if engram is None else engram.stager.stats
        self._staged = (
            None if engram is None else StagedLookup(engram.stager, ops, numerics, device)
        )
        self._lookup: EngramLookup = self._staged or DeviceLookup(config, params)
        self._layers = [
            Layer(
                config,
                params.under(f"layers.{i}"),
                i,
                rope,
                num_experts=config.n_routed_experts,
                top_k=config.num_experts_per_tok,
            )
            for i in range(config.num_hidden_layers)
        ]
        self._norm = params.norm("norm")
        self._head = params.fp32_linear("head")
        self.draft = (
            DraftModel(config, params, rope, embed=self._embed, head=self._head) if draft else None
        )

    def forward(
        self, batch: ForwardBatch, pools: DevicePools, capture: Capture | None = None
    ) -> Tensor:
        """Run one step: pools and token ring are updated, logits [S, V] float32 of `batch.logit_rows` returned."""
        step = Step(batch, pools, capture=capture, taps=None if self.draft is None else [])
        ids, history = self._resolve_tokens(batch, pools)
        engram_rows = self._look_up(batch, history, step)
        n = self.config.hc_mult
        streams = self._embed[ids].unsqueeze(1).expand(-1, n, -1).contiguous()
        pre = torch.zeros(ids.shape[0], n, dtype=torch.float32, device=ids.device)
        pre[:, 0] = 1.0
        for layer in self._layers:
            streams, pre = layer.forward(streams, pre, engram_rows, step)
            if streams.shape[0] == 0:
                break  # only open chunks: no row goes through the decoder half
        if self.draft is not None and step.taps and batch.decoder.num_rows:
            taps = torch.cat(step.taps, dim=1)
            step.record("dspark_main_hidden", -1, taps, is_tail=True)
            self.draft.write_context(
                taps, batch.decoder.positions, batch.decoder.window_store, pools
            )
        rows = batch.logit_rows
        hidden = self._norm(self.ops.hc_collapse(streams[rows], pre[rows]))
        return self._head(hidden)

    def stage_engram(self, plan: EngramPlan) -> StagedRows | None:
        """Begin to fetch the Engram rows of a step before its forward; None if nothing can be fetched yet.

        Called once for every planned step, whose look-ups are counted here.

        Args:
            plan: Ids of the step's rows.
        """
        self.engram_stats.rows += len(plan.token_ids) * self._constants.offsets.size
        if self._tables is None:
            return None
        rows = planned_rows(self._constants, plan)
        return None if rows is None else self._tables.stager.start(rows)

    def close(self) -> None:
        """Let go of what lies outside of the device's memory. A second call does nothing."""
        if self._tables is not None:
            self._tables.close()

    def _look_up(self, batch: ForwardBatch, history: Tensor, step: Step) -> EngramRows:
        """Engram rows of the step, in the tables or on their way."""
        if self._staged is not None and batch.engram is not None:
            rows = torch.from_numpy(batch.engram.rows)
            found = self._staged.attach(batch.engram)
        else:
            rows = self._hash.rows(history)
            found = self._lookup.start(rows)
        step.record("engram_hash", -1, rows, is_tail=False)
        return found

    @staticmethod
    def _resolve_tokens(batch: ForwardBatch, pools: DevicePools) -> tuple[Tensor, Tensor]:
        """Ids [T] with placeholders filled from the token ring, and the id history [T, N] of every row."""
        ring = pools.token_ring
        ring[batch.seed_index] = batch.seed_ids
        ids = torch.where(batch.token_ids >= 0, batch.token_ids, ring[batch.ring_index])
        history = torch.cat((ids, ring))[batch.history_index.clamp_min(0)]
        ring[batch.ring_store] = ids[batch.ring_rows]
        return ids, torch.where(batch.history_index >= 0, history, -1)
