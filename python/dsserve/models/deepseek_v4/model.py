"""The V4.1 text model: token ids of a step in, logits of its sampled rows out (model.md section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsserve.models.deepseek_v4.engram import EngramHash
from dsserve.models.deepseek_v4.layer import Layer
from dsserve.models.deepseek_v4.params import Params
from dsserve.models.deepseek_v4.rope import RopeTables
from dsserve.models.deepseek_v4.step import Capture, Step

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.engram.hashing import EngramConstants
    from dsserve.kv.device import DevicePools
    from dsserve.models.batch import ForwardBatch
    from dsserve_kernels.numerics import Numerics
    from dsserve_kernels.select import Operators


class DeepseekV41Model:
    """All layers of a text model; holds weights only, no request state."""

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
        """
        params = Params(tensors, ops, numerics, config.rms_norm_eps, device)
        rope = RopeTables(config, context_length, device)
        self.config, self.numerics = config, numerics
        self.ops = ops
        self._embed = params.raw("embed.weight").to(numerics.act_dtype)
        self._hash = EngramHash(config, constants, params)
        self._layers = [
            Layer(config, params.under(f"layers.{i}"), i, rope)
            for i in range(config.num_hidden_layers)
        ]
        self._norm = params.norm("norm")
        self._head = params.fp32_linear("head")

    def forward(
        self, batch: ForwardBatch, pools: DevicePools, capture: Capture | None = None
    ) -> Tensor:
        """Run one step: pools and token ring are updated, logits [S, V] float32 of `batch.logit_rows` returned."""
        step = Step(batch, pools, capture=capture)
        ids, history = self._resolve_tokens(batch, pools)
        engram_rows = self._hash.rows(history)
        step.record("engram_hash", -1, engram_rows, is_tail=False)
        n = self.config.hc_mult
        streams = self._embed[ids].unsqueeze(1).expand(-1, n, -1).contiguous()
        pre = torch.zeros(ids.shape[0], n, dtype=torch.float32, device=ids.device)
        pre[:, 0] = 1.0
        for layer in self._layers:
            streams, pre = layer.forward(streams, pre, engram_rows, step)
            if streams.shape[0] == 0:
                break  # only open chunks: no row goes through the decoder half
        rows = batch.logit_rows
        hidden = self._norm(self.ops.hc_collapse(streams[rows], pre[rows]))
        return self._head(hidden)

    @staticmethod
    def _resolve_tokens(batch: ForwardBatch, pools: DevicePools) -> tuple[Tensor, Tensor]:
        """Ids [T] with placeholders filled from the token ring, and the id history [T, N] of every row."""
        ring = pools.token_ring
        ring[batch.seed_index] = batch.seed_ids
        ids = torch.where(batch.token_ids >= 0, batch.token_ids, ring[batch.ring_index])
        history = torch.cat((ids, ring))[batch.history_index.clamp_min(0)]
        ring[batch.ring_store] = ids[batch.ring_rows]
        return ids, torch.where(batch.history_index >= 0, history, -1)
