"""Chooses the compressed rows that a query attends to (model.md sections 6.2 and 6.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.models.batch import RowSet
    from dsserve.models.deepseek_v4.params import Params
    from dsserve.models.deepseek_v4.rope import RopeTables
    from dsserve.models.deepseek_v4.step import Step


#: Numbers of index keys up to which they are read in float64 (16 MiB).
_MAX_WIDE = 1 << 21


class Indexer:
    """The indexer of one index source layer; its list serves the Reuse layers after it."""

    def __init__(self, config: ModelConfig, params: Params, layer: int, rope: RopeTables) -> None:
        """`params` is the view of the layer's attention."""
        self._ops = params.ops
        self._layer = layer
        self._kv_source = config.kv_source_of(layer)
        self._ratio = config.compress_ratios[self._kv_source]
        self._is_candidate_source = layer == config.candidate_source_layer_id
        self._is_restricted = layer > config.candidate_source_layer_id
        self._topk = config.index_topk
        self._block_size, self._num_blocks = (
            config.candidate_block_size,
            config.candidate_topk_blocks,
        )
        self._heads, self._dim = config.index_n_heads, config.index_head_dim
        self._scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self._rope = rope
        self._query = params.under("indexer").fp8_linear("wq_b")
        self._head_weights = params.under("indexer").linear("weights_proj")

    def select(self, x: Tensor, qr: Tensor, rows: RowSet, step: Step) -> None:
        """Replace the step's selection.

        Args:
            x: [T, D] attention input.
            qr: [T, q_lora_rank] normalised low-rank query.
            rows: The rows of x.
            step: `main_index` is set, and `candidates` by the candidate source.
        """
        num_keys = step.batch.max_visible[self._ratio]
        visible = rows.num_visible[self._ratio]
        if num_keys <= min(self._topk, self._num_blocks * self._block_size):
            # Every visible row is chosen and no candidate block can be left out: nothing to score.
            chosen, step.main_index = self._whole_selection(num_keys, rows, step)
            if self._is_candidate_source:
                step.candidates = None
        else:
            scores = self._scores(x, qr, rows, step, visible)
            if self._is_candidate_source:
                # Where all blocks are kept, the mask would restrict nothing.
                step.candidates = None
                if num_keys > self._num_blocks * self._block_size:
                    step.candidates = self._ops.candidate_mask(
                        scores, visible, block_size=self._block_size, num_blocks=self._num_blocks
                    )
            elif self._is_restricted and step.candidates is not None:
                scores = scores.masked_fill(~step.candidates, -torch.inf)
            step.record("index_scores", self._layer, scores, is_tail=rows is step.batch.decoder)
            chosen = self._ops.topk_rows(scores, self._topk)
            step.main_index = self._pool_rows(chosen, rows, step)
        step.record("topk", self._layer, chosen, is_tail=rows is step.batch.decoder)

    def _whole_selection(self, num_keys: int, rows: RowSet, step: Step) -> tuple[Tensor, Tensor]:
        """All visible positions and their pool rows; the same for all layers of a ratio, so found once a step."""
        key = (self._ratio, rows is step.batch.decoder)
        selection = step.whole_selections.get(key)
        if selection is None:
            visible = rows.num_visible[self._ratio]
            positions = torch.arange(num_keys, device=visible.device).unsqueeze(0)
            chosen = torch.where(positions < visible.unsqueeze(1), positions, -1)
            selection = chosen, self._pool_rows(chosen, rows, step)
            step.whole_selections[key] = selection
        return selection

    def _pool_rows(self, chosen: Tensor, rows: RowSet, step: Step) -> Tensor:
        """[T, K] pool rows of positions, -1 = none."""
        pool_rows = step.batch.source_index[self._ratio][rows.row_request]
        return torch.where(chosen >= 0, pool_rows.gather(1, chosen.clamp_min(0)), -1)

    def _scores(self, x: Tensor, qr: Tensor, rows: RowSet, step: Step, visible: Tensor) -> Tensor:
        """[T, N] float32 index scores, -inf where not visible."""
        query = self._query(qr).view(-1, self._heads, self._dim)
        query = self._ops.round_fp4_index(
            self._ops.rope(query, step.rotation(self._rope, rows, is_compressed=True))
        )
        weights = self._head_weights(x).float() * self._scale
        keys = self._keys(step)
        scores: Tensor = self._ops.index_scores(query, weights, keys, rows.row_request, visible)
        return scores

    def _keys(self, step: Step) -> Tensor:
        """[B, N, di] index keys of all requests; read once for all index sources of a KV source."""
        keys = step.index_keys.get(self._kv_source)
        if keys is None:
            index = step.batch.source_index[self._ratio]
            # Few keys are widened here as the products read them, many only part by part.
            is_small = index.numel() * self._dim <= _MAX_WIDE
            keys = step.index_keys[self._kv_source] = self._ops.load_index_rows(
                step.pools.index[self._kv_source],
                index,
                torch.float64 if is_small else torch.float32,
            )
        return keys
