"""Attention of one layer: latent query, one shared key-value row, sparse key set (model.md section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve.models.deepseek_v4.compressor import Compressor
from dsserve.models.deepseek_v4.indexer import Indexer
from dsserve.models.deepseek_v4.params import by_columns
from dsserve_kernels.fused.weights import AttentionInput, AttentionOutput

if TYPE_CHECKING:
    from torch import Tensor

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
        self._dim = config.head_dim
        self._rope = rope
        # The stages of the draft model lie behind the target's layers and see a window only.
        self._is_compressed = layer < config.num_hidden_layers and config.compress_ratios[layer] > 0
        self._kv_source = config.kv_source_of(layer) if self._is_compressed else None
        self._sink = params.float32("attn_sink")
        quantize = params.numerics.quantize_activations
        self._input = AttentionInput(
            input=params.fp8_linear("wq_a", "wkv").weight,
            query=params.fp8_linear("wq_b").weight,
            query_norm=params.norm("q_norm").weight,
            latent_norm=params.norm("kv_norm").weight,
            eps=params.eps,
            num_heads=config.num_attention_heads,
            quantize=quantize,
        )
        # wo_a is stored in FP8 but used as BF16: its input is not quantised (weights.md section 3).
        group = params.fp8_weight("wo_a").view(config.o_groups, config.o_lora_rank, -1)
        self._output = AttentionOutput(
            group=by_columns(group), output=params.fp8_linear("wo_b").weight, quantize=quantize
        )
        is_source = layer in config.kv_source_layer_ids
        self.compressor = Compressor(config, params, layer, rope) if is_source else None
        self._indexer = (
            Indexer(config, params, layer, rope) if layer in config.index_source_layer_ids else None
        )

    def compress(self, x: Tensor, step: Step) -> None:
        """Write the compressed rows that the step completes, if the layer is a KV source; x [T, D] is its input."""
        if self.compressor is not None:
            self.compressor.write(x, step)

    def attend(self, x: Tensor, rows: RowSet, step: Step) -> Tensor:
        """Attention output [T, D] of `rows`, whose window rows are written.

        Args:
            x: [T, D] attention input.
            rows: The rows of x.
            step: Pools and the current selection; an index source replaces the selection.
        """
        ops = self._ops
        cos_sin = step.rotation(self._rope, rows, is_compressed=self._is_compressed)
        low, q, latent = ops.attention_input(ops, x, cos_sin, self._input)
        if self._indexer is not None:
            self._indexer.select(x, low, rows, step)
        values = ops.window_attention(
            ops,
            q,
            latent,
            step.pools.window[self._layer],
            step.window_index(rows),
            step.pools.rings.get(self._layer),
            None if self._kv_source is None else step.pools.main[self._kv_source],
            step.main_index if self._is_compressed else None,
            self._sink,
            scale=self._dim**-0.5,
            round_weights=self._numerics.round_softmax_weights,
        )
        result: Tensor = ops.attention_output(ops, values, cos_sin, self._output)
        return result
