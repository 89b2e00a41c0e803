"""One transformer block on the residual streams (model.md section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsserve.models.deepseek_v4.attention import Attention
from dsserve.models.deepseek_v4.engram import Engram
from dsserve.models.deepseek_v4.mhc import HyperConnection
from dsserve.models.deepseek_v4.moe import MoE

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.config.model import ModelConfig
    from dsserve.models.deepseek_v4.engram import EngramRows
    from dsserve.models.deepseek_v4.params import Params
    from dsserve.models.deepseek_v4.rope import RopeTables
    from dsserve.models.deepseek_v4.step import Step


class Layer:
    """Engram (where it has one), attention and MoE, each around the mHC streams."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        layer: int,
        rope: RopeTables,
        *,
        num_experts: int,
        top_k: int,
    ) -> None:
        """Prepare a layer of the target, or a stage of the draft model.

        Args:
            config: The model.
            params: The view of `layers.<layer>` or `mtp.<stage>`.
            layer: Its index; draft stages follow the target's layers.
            rope: Rotary tables.
            num_experts: Routed experts.
            top_k: Experts of a row.
        """
        self._ops = params.ops
        self._layer = layer
        self._attn_mix = HyperConnection(config, params, "attn")
        self._ffn_mix = HyperConnection(config, params, "ffn")
        self._attention = Attention(config, params.under("attn"), layer, rope)
        self._moe = MoE(
            config,
            params.under("ffn"),
            layer,
            num_experts=num_experts,
            top_k=top_k,
        )
        has_engram = layer in config.engram_layer_ids
        self._engram = Engram(params.under("engram")) if has_engram else None
        self._engram_column = config.engram_layer_ids.index(layer) if has_engram else -1
        #: The decoder half starts at the last KV source, where decoder replay narrows the rows (replay.md section 2).
        self._is_decoder = layer >= config.last_kv_source_layer_id
        self._cuts = layer == config.last_kv_source_layer_id
        is_tap = config.has_draft and layer in config.dspark_target_layer_ids
        streams = config.hc_mult
        self._tap_share = (
            torch.full((1, streams), 1 / streams, device=params.device) if is_tap else None
        )

    def forward(
        self, streams: Tensor, pre: Tensor, engram_rows: EngramRows, step: Step
    ) -> tuple[Tensor, Tensor]:
        """New streams [T, n, D] and the pre-mix [T, n] of the next sublayer.

        The last KV source writes its compressed rows for all rows, then goes on with the tail rows alone, so the
        result may have fewer rows than the input.

        Args:
            streams: [T, n, D].
            pre: [T, n] pre-mix from the sublayer before.
            engram_rows: Table rows of the step (`engram.NO_ROWS` for a draft stage, which has no Engram).
            step: The step.
        """
        if self._engram is not None:
            streams = self._engram.forward(streams, engram_rows.values(self._engram_column))
            step.record("engram_stream", self._layer, streams, is_tail=False)
        batch, is_tail = step.batch, self._is_decoder
        if self._cuts and batch.tail_rows is not None:
            x = self._attn_mix.input(streams, pre)
            self._attention.compress(x, step)
            streams, x = streams[batch.tail_rows], x[batch.tail_rows]
            next_pre, post, comb = self._attn_mix.mixes(streams)
        else:
            x, next_pre, post, comb = self._attn_mix.enter(streams, pre)
            self._attention.compress(x, step)
        if self._tap_share is not None and step.taps is not None:
            here = streams if is_tail or batch.tail_rows is None else streams[batch.tail_rows]
            step.taps.append(self._ops.hc_collapse(here, self._tap_share.expand(here.shape[0], -1)))
        rows = batch.decoder if is_tail else batch.encoder
        y = self._attention.attend(x, rows, step)
        step.record("attn_out", self._layer, y, is_tail=is_tail)
        streams = self._ops.hc_expand(y, streams, post, comb)
        x, pre, post, comb = self._ffn_mix.enter(streams, next_pre)
        y = self._moe.forward(x, step, is_tail=is_tail)
        step.record("ffn_out", self._layer, y, is_tail=is_tail)
        streams = self._ops.hc_expand(y, streams, post, comb)
        step.record("stream", self._layer, streams, is_tail=is_tail)
        step.record("next_pre", self._layer, pre, is_tail=is_tail)
        return streams, pre
