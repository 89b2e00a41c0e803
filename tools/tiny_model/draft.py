"""The DSpark head: forward of a block of drafts (dspark.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tools.tiny_model import ops
from tools.tiny_model.model import Batch, mixes, moe, project_out
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from tools.tiny_model.params import Weights

    from dsserve.config.model import ModelConfig


@dataclass(slots=True)
class Block:
    """Drafts of every anchor.

    Attributes:
        base: [A, gamma, V] base logits.
        hidden: [A * gamma, D] collapsed hidden state before the draft's norm.
        loads: Per stage, each expert's share.
    """

    base: Tensor
    hidden: Tensor
    loads: list[Tensor]


class Draft:
    """Forward of the head; holds constants, no weights."""

    def __init__(self, config: ModelConfig, table: Tensor) -> None:
        """`table`: rotary table of window-only layers."""
        self.config, self._table = config, table
        self._last = f"mtp.{config.num_nextn_predict_layers - 1}."

    def block(
        self,
        target: Weights,
        weights: Weights,
        taps: Tensor,
        batch: Batch,
        anchors: Tensor,
        *,
        quantize: bool = True,
    ) -> Block:
        """Run the block of each anchor.

        Args:
            target: Weights of the target (embedding and LM head are used).
            weights: Weights of the head.
            taps: [B * T, taps * D] of the target.
            batch: The rows.
            anchors: [A] flat indices (row * T + t0): newest token whose tap is known; the anchor is the next token.
            quantize: `Q8` on the inputs of FP8 and FP4 products.
        """
        config = self.config
        length, gamma, width = batch.ids.shape[1], config.dspark_block_size, config.sliding_window
        count, eps = len(anchors), config.rms_norm_eps

        def rounded(x: Tensor) -> Tensor:
            return ops.q8(x) if quantize else x

        context = ops.rms_norm(
            linear(rounded(taps), weights["mtp.0.main_proj.weight"]),
            weights["mtp.0.main_norm.weight"],
            eps,
        )
        context = rounded(context)
        position = anchors % length
        places = position.unsqueeze(1) + torch.arange(1, gamma + 1, device=anchors.device)
        history = position.unsqueeze(1) + torch.arange(1 - width, 1, device=anchors.device)
        seen = history >= batch.start.flatten()[anchors].unsqueeze(1)
        index = (anchors - position).unsqueeze(1) + history.clamp_min(0)
        mask = torch.cat((seen, torch.ones_like(places, dtype=torch.bool)), 1).view(count, 1, 1, -1)
        ids = torch.full((count, gamma), config.dspark_noise_token_id, device=anchors.device)
        ids[:, 0] = batch.ids.flatten()[anchors + 1]
        streams = (
            target["embed.weight"][ids.flatten()]
            .to(taps.dtype)
            .unsqueeze(1)
            .repeat(1, config.hc_mult, 1)
        )
        pre = torch.zeros(count * gamma, config.hc_mult, device=anchors.device)
        pre[:, 0] = 1.0
        here, all_places = self._table[places], self._table[:length]
        loads = []
        for stage in range(config.num_nextn_predict_layers):
            prefix = f"mtp.{stage}."
            next_pre, post, comb = mixes(weights, f"{prefix}hc_attn", streams, config)
            x = ops.collapse_norm(streams, pre, weights[f"{prefix}attn_norm.weight"], eps)
            known = self._rows(
                weights, prefix, context.view(-1, length, context.shape[-1]), all_places
            )
            y = self._attend(
                weights,
                prefix,
                rounded(x).view(count, gamma, -1),
                here,
                known.flatten(0, 1)[index],
                mask,
                quantize,
            )
            streams = ops.expand(y.flatten(0, 1), streams, post, comb)
            pre, post, comb = mixes(weights, f"{prefix}hc_ffn", streams, config)
            x = ops.collapse_norm(streams, next_pre, weights[f"{prefix}ffn_norm.weight"], eps)
            y, load = moe(
                weights,
                f"{prefix}ffn.",
                x,
                config,
                config.dspark_num_experts_per_tok,
                quantize=quantize,
            )
            loads.append(load)
            streams = ops.expand(y, streams, post, comb)
        hidden = ops.collapse(streams, pre)
        normed = ops.rms_norm(hidden, weights[f"{self._last}norm.weight"], eps)
        base = linear(normed, target["head.weight"].to(normed.dtype))
        return Block(base.view(count, gamma, -1), hidden, loads)

    def markov(self, weights: Weights, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding [.., rank] of the tokens before the drafts, and the bias [.., V] it gives."""
        embedded = ops.lookup(
            weights[f"{self._last}markov_head.embed.weight"], previous.flatten()
        ).view(*previous.shape, -1)
        return embedded, linear(embedded, weights[f"{self._last}markov_head.head.weight"])

    def confidence(self, weights: Weights, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Raw confidence [A, gamma]."""
        joined = torch.cat((hidden.view(*embedded.shape[:2], -1).float(), embedded.float()), -1)
        return linear(joined, weights[f"{self._last}confidence_head.proj.weight"].float()).squeeze(
            -1
        )

    def propose(self, weights: Weights, block: Block, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy drafts [A, gamma] and raw confidences, each draft conditioned on the one before."""
        previous, drafts, embeddings = anchor, [], []
        for k in range(self.config.dspark_block_size):
            embedded, bias = self.markov(weights, previous)
            previous = (block.base[:, k].float() + bias.float()).argmax(-1)
            drafts.append(previous)
            embeddings.append(embedded)
        return torch.stack(drafts, 1), self.confidence(
            weights, block.hidden, torch.stack(embeddings, 1)
        )

    def _rows(self, weights: Weights, prefix: str, x: Tensor, places: Tensor) -> Tensor:
        """Key-value rows of (already rounded) inputs."""
        latent = linear(x, weights[f"{prefix}attn.wkv.weight"])
        latent = ops.rms_norm(
            latent, weights[f"{prefix}attn.kv_norm.weight"], self.config.rms_norm_eps
        )
        return ops.q8(ops.rope(latent, places[..., 0], places[..., 1]))

    def _attend(
        self,
        weights: Weights,
        prefix: str,
        x: Tensor,
        here: Tensor,
        known: Tensor,
        mask: Tensor,
        quantize: bool,
    ) -> Tensor:
        config = self.config
        heads, dim = config.num_attention_heads, config.head_dim
        count, gamma, _ = x.shape
        qr = ops.rms_norm(
            linear(x, weights[f"{prefix}attn.wq_a.weight"]),
            weights[f"{prefix}attn.q_norm.weight"],
            config.rms_norm_eps,
        )
        q = linear(ops.q8(qr) if quantize else qr, weights[f"{prefix}attn.wq_b.weight"]).view(
            count, gamma, heads, dim
        )
        cos, sin = here[..., 0].unsqueeze(2), here[..., 1].unsqueeze(2)
        q = ops.rope(q, cos, sin)
        keys = torch.cat((known, self._rows(weights, prefix, x, here)), 1)
        scores = (q.view(count, gamma * heads, dim) @ keys.transpose(1, 2)).view(
            count, gamma, heads, -1
        )
        sink = weights[f"{prefix}attn.attn_sink"].unsqueeze(-1)
        share = ops.attend_window(scores, mask.expand(-1, gamma, -1, -1), sink, dim**-0.5)
        out = (share.view(count, gamma * heads, -1) @ keys).view(count, gamma, heads, dim)
        return project_out(
            ops.rope(out, cos, -sin), weights, f"{prefix}attn.", config, quantize=quantize
        )
