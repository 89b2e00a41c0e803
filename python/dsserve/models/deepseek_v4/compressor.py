"""Writes the compressed rows and index keys of a KV source layer (model.md section 6.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.models.batch import CompressRows
    from dsserve.models.deepseek_v4.params import Params
    from dsserve.models.deepseek_v4.rope import RopeTables
    from dsserve.models.deepseek_v4.step import Step


class Compressor:
    """Projects the input of a KV source layer to latents, pools pairs at ratio 2, stores both derived rows."""

    def __init__(self, config: ModelConfig, params: Params, layer: int, rope: RopeTables) -> None:
        """`params` is the view of the layer's attention."""
        self._ops = params.ops
        self._layer = layer
        self._ratio = config.compress_ratios[layer]
        self._rope = rope
        self._dim = config.head_dim
        under = params.under("compressor")
        self._dtype = params.numerics.act_dtype
        if self._ratio == 1:
            self._project_one = under.linear("wkv")
        else:
            self._project_pair = under.fp32_linear("wkv", "wgate")
        self._norm = under.norm("norm")
        self._index_key = params.under("indexer").linear("wk")
        self._index_norm = params.under("indexer").norm("k_norm")

    def write(self, x: Tensor, step: Step) -> None:
        """Store the rows that the step completes.

        Args:
            x: [T, D] attention input of all rows of the step.
            step: The step; its pools are written.
        """
        plan = step.batch.compress[self._ratio]
        pooled = self._project_one(x) if self._ratio == 1 else self._pool_pairs(x, step, plan)
        latent = self._norm(pooled)
        cos_sin = self._rope.compressed(plan.positions)
        key = self._ops.rope(self._index_norm(self._index_key(latent)), cos_sin)
        self._ops.store_index_rows(step.pools.index[self._layer], plan.store, key)
        self._ops.store_main_rows(
            step.pools.main[self._layer], plan.store, self._ops.rope(latent, cos_sin)
        )

    def _pool_pairs(self, x: Tensor, step: Step, plan: CompressRows) -> Tensor:
        """Pooled latents [n, d] of the pairs completed in this step; keeps (u, g) of the last rows."""
        ring = step.pools.tail[self._layer]
        gated = self._project_pair(x).view(x.shape[0], 2, self._dim)
        pooled: Tensor = self._ops.pool_pairs(
            torch.cat((gated, ring))[plan.first], gated[plan.rows], self._dtype
        )
        ring[plan.tail_store] = gated[plan.tail_rows]
        return pooled
