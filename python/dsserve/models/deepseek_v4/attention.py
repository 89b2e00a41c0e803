"""Attention of one layer: latent query, one shared key-value row, sparse key set (model.md section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsserve.models.deepseek_v4.compressor import Compressor
from dsserve.models.deepseek_v4.indexer import Indexer

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.models.batch import RowSet
    from dsserve.models.deepseek_v4.params import Params
    from dsserve.models.deepseek_v4.rope import RopeTables
    from dsserve.models.deepseek_v4.step import Step


class Attention:
    """One layer's attention, with its compressor and indexer where it owns them."""

    def __init__(self, config: ModelConfig, params: Params, layer: int, rope: RopeTables) -> None:
        """`params` is the view of the layer's `attn`."""
        self._ops, self._numerics = params.ops, params.numerics
        self._layer = layer
        self._heads, self._dim = config.num_attention_heads, config.head_dim
        self._groups = config.o_groups
        self._rank = config.q_lora_rank
        self._rope = rope
        # The stages of the draft model lie behind the target's layers and see a window only.
        self._is_compressed = layer < config.num_hidden_layers and config.compress_ratios[layer] > 0
        self._kv_source = config.kv_source_of(layer) if self._is_compressed else None
        self._input = params.fp8_linear("wq_a", "wkv")
        self._q_norm = params.norm("q_norm")
        self._kv_norm = params.norm("kv_norm")
        self._query = params.fp8_linear("wq_b")
        self._sink = params.float32("attn_sink")
        # wo_a is stored in FP8 but used as BF16: its input is not quantised (weights.md section 3).
        self._group_weight = params.fp8_weight("wo_a").view(self._groups, config.o_lora_rank, -1)
        self._output = params.fp8_linear("wo_b")
        is_source = layer in config.kv_source_layer_ids
        self.compressor = Compressor(config, params, layer, rope) if is_source else None
        self._indexer = (
            Indexer(config, params, layer, rope) if layer in config.index_source_layer_ids else None
        )

    def attend(self, x: Tensor, rows: RowSet, step: Step) -> Tensor:
        """Attention output [T, D] of `rows`, whose window rows are written.

        Args:
            x: [T, D] attention input.
            rows: The rows of x.
            step: Pools and the current selection; an index source replaces the selection.
        """
        cos_sin = step.rotation(self._rope, rows, is_compressed=self._is_compressed)
        projected = self._input(x)
        low, latent = projected[:, : self._rank], projected[:, self._rank :]
        qr = self._q_norm(low)
        q = self._ops.rope(self._query(qr).view(-1, self._heads, self._dim), cos_sin)
        window_rows = self._window_rows(self._ops.rope(self._kv_norm(latent), cos_sin), rows, step)
        if self._indexer is not None:
            self._indexer.select(x, qr, rows, step)
        out = self._ops.sparse_attention(
            q,
            window_rows,
            rows.window_index,
            None if self._kv_source is None else step.pools.main[self._kv_source],
            step.main_index if self._is_compressed else None,
            self._sink,
            scale=self._dim**-0.5,
            round_weights=self._numerics.round_softmax_weights,
        )
        out = self._ops.rope(out, cos_sin, inverse=True).view(
            x.shape[0], self._groups, self._heads // self._groups * self._dim
        )
        return self._output(self._ops.grouped_linear(out, self._group_weight))

    def _window_rows(self, latent: Tensor, rows: RowSet, step: Step) -> Tensor:
        """Rows the step's windows see [B * C + T, d]: those before each request's first row, then the new ones."""
        pool = step.pools.window[self._layer]
        context = self._ops.load_window_rows(pool, rows.context_index, latent.dtype)
        return torch.cat((context, self._ops.store_window_rows(pool, rows.window_store, latent)))
