"""The training forward of the target: packed rows in, hidden states, taps and losses out (model.md sections 3 to 8).

A row holds several samples; each token sees only its own sample, whose first position is a multiple of 8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tools.tiny_model import ops
from torch import Tensor
from torch.nn.functional import linear, pad

from dsserve_kernels.reference.norm import rope_frequencies, rope_table, yarn_frequencies

if TYPE_CHECKING:
    from tools.tiny_model.params import Weights

    from dsserve.config.model import ModelConfig
    from dsserve.engram.hashing import EngramConstants


@dataclass(slots=True)
class Batch:
    """Packed rows.

    Attributes:
        ids: [B, T] int64.
        start: [B, T] int32, row position of the first token of the token's sample.
        floor: [B, T] int32, row position of the bounded replay's cut in the token's sample; 0 = none.
    """

    ids: Tensor
    start: Tensor
    floor: Tensor


@dataclass(slots=True)
class Mode:
    """How a forward runs.

    Attributes:
        dense: Every visible compressed row is attended, nothing is selected.
        quantize: `Q8` on the inputs of FP8 and FP4 products.
        index_rows: [t] int64 row positions on which the index loss is taken, or None.
        encoder_replay: Scalar 0 or 1 (a tensor in training), see `Batch.floor`.
        decoder_replay: The same for the decoder half.
    """

    dense: bool = False
    quantize: bool = True
    index_rows: Tensor | None = None
    encoder_replay: Tensor | int = 0
    decoder_replay: Tensor | int = 0


@dataclass(slots=True)
class Output:
    """What a forward gives.

    Attributes:
        hidden: [B * T, D] before the final norm.
        taps: [B * T, taps * D] inputs of the draft head.
        index_losses: One scalar per index source.
        loads: Per layer, [E] share of tokens that chose each expert.
    """

    hidden: Tensor
    taps: Tensor
    index_losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Pass:
    """State of one forward."""

    weights: Weights
    mode: Mode
    windows: tuple[Tensor, Tensor]
    visible: dict[int, Tensor]
    main: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    selected: Tensor | None = None
    candidates: Tensor | None = None
    sub_scores: dict[int, Tensor] = field(default_factory=dict)
    sub_targets: dict[int, Tensor] = field(default_factory=dict)
    loads: list[Tensor] = field(default_factory=list)


class Target:
    """The backbone; holds constants, no weights."""

    def __init__(
        self, config: ModelConfig, constants: EngramConstants, *, length: int, device: torch.device
    ) -> None:
        self.config, self.device = config, device
        dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        yarn = yarn_frequencies(
            dim, config.compress_rope_theta, factor=scaling.factor, beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow, original_length=scaling.original_max_position_embeddings,
        )  # fmt: skip
        self.window_table = rope_table(rope_frequencies(dim, config.rope_theta), length).to(device)
        self.compressed_table = rope_table(yarn, length).to(device)

        def as_tensor(array: Any) -> Tensor:
            return torch.as_tensor(array, dtype=torch.int64, device=device)

        self._token_map, self._multipliers = (
            as_tensor(constants.token_map),
            as_tensor(constants.multipliers),
        )
        self._primes, self._offsets = as_tensor(constants.primes), as_tensor(constants.offsets)
        self._pad = int(constants.token_map[config.engram_pad_token_id])

    def forward(
        self, weights: Weights, batch: Batch, mode: Mode, *, dtype: torch.dtype = torch.bfloat16
    ) -> Output:
        """Run all layers.

        Args:
            weights: Cooked weights.
            batch: Packed rows; T a multiple of the window and of 8.
            mode: See `Mode`.
            dtype: Type of activations.
        """
        config = self.config
        rows, length = batch.ids.shape
        n = config.hc_mult
        state = self._start(weights, batch, mode)
        looked_up = self._engram_rows(batch)
        streams = ops.lookup(weights["embed.weight"], batch.ids.flatten()).to(dtype)
        streams = streams.unsqueeze(1).expand(-1, n, -1).contiguous()
        pre = torch.zeros(rows * length, n, dtype=torch.float32, device=self.device)
        pre[:, 0] = 1.0
        taps = []
        for layer in range(config.num_hidden_layers):
            if layer in config.engram_layer_ids:
                streams = self._engram(
                    layer, streams, looked_up[config.engram_layer_ids.index(layer)], state
                )
            if layer in config.dspark_target_layer_ids:
                taps.append(streams.float().mean(1).to(dtype))
            streams, pre = self._layer(layer, streams, pre, (rows, length), state)
        hidden = ops.collapse(streams, pre)
        losses = [
            ops.index_loss(state.sub_scores[i], state.sub_targets[i]) for i in state.sub_scores
        ]
        return Output(hidden, torch.cat(taps, -1), losses, state.loads)

    def logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V] in the activations' type (float32 for float32)."""
        x = ops.rms_norm(hidden, weights["norm.weight"], self.config.rms_norm_eps)
        return linear(x, weights["head.weight"].to(x.dtype))

    def _start(self, weights: Weights, batch: Batch, mode: Mode) -> _Pass:
        length, width = batch.ids.shape[1], self.config.sliding_window
        position = torch.arange(length, device=self.device)
        block = position // width * width
        key = block.unsqueeze(1) - width + torch.arange(2 * width, device=self.device)
        near = (key <= position.unsqueeze(1)) & (key > position.unsqueeze(1) - width)
        seen = near & (key >= batch.start.unsqueeze(-1))

        def floored(flag: Tensor | int) -> Tensor:
            floor = (batch.floor * flag).unsqueeze(-1)
            return (seen & ((key >= floor) | (position.unsqueeze(1) < floor))).unsqueeze(2)

        visible = {}
        for ratio in {r for r in self.config.compress_ratios if r > 0}:
            first = torch.arange(length // ratio, device=self.device) * ratio
            visible[ratio] = (first >= batch.start.unsqueeze(-1)) & (
                first + ratio <= position.unsqueeze(1) + 1
            )
        return _Pass(
            weights, mode, (floored(mode.encoder_replay), floored(mode.decoder_replay)), visible
        )

    def _engram_rows(self, batch: Batch) -> list[Tensor]:
        """Table rows per Engram layer, [B * T, columns]."""
        length = batch.ids.shape[1]
        position = torch.arange(length, device=self.device)
        mapped = self._token_map[batch.ids]
        history = [
            torch.where(position - shift >= batch.start, mapped.roll(shift, 1), self._pad)
            for shift in range(self.config.engram_max_ngram_size)
        ]
        result = []
        for layer in range(len(self.config.engram_layer_ids)):
            mixed = history[0] * self._multipliers[layer, 0]
            columns = []
            for n in range(1, len(history)):
                mixed = mixed ^ (history[n] * self._multipliers[layer, n])
                columns.append(mixed.unsqueeze(-1) % self._primes[layer, n - 1])
            result.append((torch.cat(columns, -1) + self._offsets[layer]).flatten(0, 1))
        return result

    def _engram(self, layer: int, streams: Tensor, rows: Tensor, state: _Pass) -> Tensor:
        prefix = f"layers.{layer}.engram."
        weights = state.weights
        looked_up = ops.lookup(weights[f"{prefix}embed.weight"], rows).flatten(1).to(streams.dtype)
        kv = self._quantised(looked_up, weights[f"{prefix}wkv.weight"], state)
        result: Tensor = ops.engram_gate(
            streams, kv, weights[f"{prefix}q_weight"], weights[f"{prefix}k_weight"]
        )
        return result

    def _layer(
        self, layer: int, streams: Tensor, pre: Tensor, shape: tuple[int, int], state: _Pass
    ) -> tuple[Tensor, Tensor]:
        prefix = f"layers.{layer}."
        weights, eps = state.weights, self.config.rms_norm_eps
        next_pre, post, comb = mixes(weights, f"{prefix}hc_attn", streams, self.config)
        x = ops.collapse_norm(streams, pre, weights[f"{prefix}attn_norm.weight"], eps)
        y = self._attention(layer, x.unflatten(0, shape), state).flatten(0, 1)
        streams = ops.expand(y, streams, post, comb)
        pre, post, comb = mixes(weights, f"{prefix}hc_ffn", streams, self.config)
        x = ops.collapse_norm(streams, next_pre, weights[f"{prefix}ffn_norm.weight"], eps)
        y, load = moe(
            weights,
            f"{prefix}ffn.",
            x,
            self.config,
            self.config.num_experts_per_tok,
            quantize=state.mode.quantize,
        )
        state.loads.append(load)
        return ops.expand(y, streams, post, comb), pre

    def _quantised(self, x: Tensor, weight: Tensor, state: _Pass) -> Tensor:
        return linear(ops.q8(x) if state.mode.quantize else x, weight)

    def _attention(self, layer: int, x: Tensor, state: _Pass) -> Tensor:
        config, weights = self.config, state.weights
        prefix = f"layers.{layer}.attn."
        rows, length, _ = x.shape
        heads, dim, width = config.num_attention_heads, config.head_dim, config.sliding_window
        ratio = config.compress_ratios[layer]
        table = (self.compressed_table if ratio else self.window_table)[:length]
        cos, sin = table[..., 0], table[..., 1]
        xq = ops.q8(x) if state.mode.quantize else x
        qr = ops.rms_norm(
            linear(xq, weights[f"{prefix}wq_a.weight"]),
            weights[f"{prefix}q_norm.weight"],
            config.rms_norm_eps,
        )
        latent = ops.rms_norm(
            linear(xq, weights[f"{prefix}wkv.weight"]),
            weights[f"{prefix}kv_norm.weight"],
            config.rms_norm_eps,
        )
        qrq = ops.q8(qr) if state.mode.quantize else qr
        q = linear(qrq, weights[f"{prefix}wq_b.weight"]).view(rows, length, heads, dim)
        q = ops.rope(q, cos.unsqueeze(1), sin.unsqueeze(1))
        window = ops.q8(ops.rope(latent, cos, sin))
        blocks = length // width
        both = pad(window, (0, 0, width, 0)).view(rows, blocks + 1, width, dim)
        keys = torch.cat((both[:, :-1], both[:, 1:]), 2)
        sw = (q.view(rows, blocks, width * heads, dim) @ keys.transpose(2, 3)).view(
            rows, length, heads, 2 * width
        )
        mw = state.windows[layer >= config.last_kv_source_layer_id]
        sink = weights[f"{prefix}attn_sink"].unsqueeze(-1)
        scale = dim**-0.5
        if ratio:
            self._compress(layer, x, state)
            main = state.main[config.kv_source_of(layer)]
            if layer in config.index_source_layer_ids:
                self._select(layer, x, qrq, state)
            sc = (q.view(rows, length * heads, dim) @ main.transpose(1, 2)).view(
                rows, length, heads, -1
            )
            chosen = state.visible[ratio] if state.mode.dense else state.selected
            pw, pc = ops.attend(sw, sc, mw, chosen.unsqueeze(2), sink, scale)  # type: ignore[union-attr]
            self._index_target(layer, sw, sc, mw, sink, state)
            out = (pc.view(rows, length * heads, -1) @ main).view(rows, length, heads, dim)
        else:
            pw = ops.attend_window(sw, mw, sink, scale)
            out = None
        near = (pw.view(rows, blocks, width * heads, 2 * width) @ keys).view(
            rows, length, heads, dim
        )
        out = near if out is None else near + out
        out = ops.rope(out, cos.unsqueeze(1), -sin.unsqueeze(1))
        return project_out(out, weights, prefix, config, quantize=state.mode.quantize)

    def _compress(self, layer: int, x: Tensor, state: _Pass) -> None:
        """Main rows and index keys of a KV source."""
        config, weights = self.config, state.weights
        if layer not in config.kv_source_layer_ids:
            return
        prefix = f"layers.{layer}.attn."
        ratio = config.compress_ratios[layer]
        weight = weights[f"{prefix}compressor.wkv.weight"]
        if ratio == 1:
            pooled = linear(x, weight)
        else:
            wide = x.float()
            u = linear(wide, weight.float()).unflatten(1, (-1, ratio))
            g = linear(wide, weights[f"{prefix}compressor.wgate.weight"].float()).unflatten(
                1, (-1, ratio)
            )
            pooled = ops.pool_pairs(u, g).to(x.dtype)
        latent = ops.rms_norm(
            pooled, weights[f"{prefix}compressor.norm.weight"], config.rms_norm_eps
        )
        table = self.compressed_table[: x.shape[1] : ratio]
        cos, sin = table[..., 0], table[..., 1]
        # The indexer learns from its own loss alone.
        key = linear(latent.detach(), weights[f"{prefix}indexer.wk.weight"])
        key = ops.rms_norm(key, weights[f"{prefix}indexer.k_norm.weight"], config.rms_norm_eps)
        state.keys[layer] = ops.q4_index(ops.rope(key, cos, sin))
        state.main[layer] = ops.q4_main(ops.rope(latent, cos, sin))

    def _select(self, layer: int, x: Tensor, qrq: Tensor, state: _Pass) -> None:
        """Selection of an index source, and its scores on the rows of the index loss."""
        config, mode = self.config, state.mode
        visible = state.visible[config.compress_ratios[layer]]
        if mode.index_rows is not None:
            rows = mode.index_rows
            state.sub_scores[layer] = self._scores(
                layer, x.detach()[:, rows], qrq.detach()[:, rows], state, rows, visible[:, rows]
            )
        if mode.dense:
            return
        with torch.no_grad():
            every = torch.arange(x.shape[1], device=self.device)
            scores = self._scores(layer, x, qrq, state, every, visible)
            # Equal scores (all heads rectified) go to the lower position.
            scores = scores - 1e-12 * torch.arange(scores.shape[-1], device=self.device)
            if layer == config.candidate_source_layer_id:
                state.candidates = self._candidates(scores, every)
            elif layer > config.candidate_source_layer_id and state.candidates is not None:
                scores = torch.where(state.candidates, scores, -torch.inf)
            state.selected = top_mask(scores, config.index_topk)

    def _scores(
        self, layer: int, x: Tensor, qrq: Tensor, state: _Pass, positions: Tensor, visible: Tensor
    ) -> Tensor:
        config, weights = self.config, state.weights
        prefix = f"layers.{layer}.attn.indexer."
        heads, dim = config.index_n_heads, config.index_head_dim
        table = self.compressed_table[positions]
        query = linear(qrq, weights[f"{prefix}wq_b.weight"]).unflatten(-1, (heads, dim))
        query = ops.q4_index(
            ops.rope(query, table[..., 0].unsqueeze(1), table[..., 1].unsqueeze(1))
        )
        head_weights = linear(x, weights[f"{prefix}weights_proj.weight"]).float() * (
            dim**-0.5 * heads**-0.5
        )
        keys = state.keys[config.kv_source_of(layer)]
        dots = (query.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (-1, heads))
        result: Tensor = ops.index_scores(dots, head_weights, visible)
        return result

    def _candidates(self, scores: Tensor, positions: Tensor) -> Tensor | None:
        config = self.config
        size = config.candidate_block_size
        if scores.shape[-1] // size <= config.candidate_topk_blocks:
            return None
        best = scores.unflatten(-1, (-1, size)).amax(-1)
        blocks = torch.arange(best.shape[-1], device=self.device)
        best = torch.where(blocks == (positions // size).unsqueeze(1), torch.inf, best)
        return top_mask(best, config.candidate_topk_blocks).repeat_interleave(size, -1)

    def _index_target(
        self, layer: int, sw: Tensor, sc: Tensor, mw: Tensor, sink: Tensor, state: _Pass
    ) -> None:
        """Add this layer's attention without selection to its index source's target."""
        rows = state.mode.index_rows
        if rows is None:
            return
        source = self.config.index_source_of(layer)
        visible = state.visible[self.config.compress_ratios[layer]]
        target = ops.dense_weights(
            sw.detach()[:, rows], sc.detach()[:, rows], mw[:, rows], visible[:, rows].unsqueeze(2), sink.detach(),
            self.config.head_dim**-0.5,
        )  # fmt: skip
        previous = state.sub_targets.get(source)
        state.sub_targets[source] = target if previous is None else previous + target


def top_mask(scores: Tensor, k: int) -> Tensor:
    """Where the k largest finite scores of each row are."""
    if scores.shape[-1] <= k:
        return scores > -torch.inf
    least = torch.topk(scores, k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return (scores >= least) & (scores > -torch.inf)


def project_out(
    out: Tensor, weights: Weights, prefix: str, config: ModelConfig, *, quantize: bool
) -> Tensor:
    """Attention output [.., H, d] through both output projections -> [.., D]."""
    groups = config.o_groups
    shape = out.shape[:-2]
    grouped = out.reshape(-1, groups, out.shape[-2] // groups * out.shape[-1]).transpose(0, 1)
    low = grouped @ weights[f"{prefix}wo_a.weight"].view(groups, config.o_lora_rank, -1).transpose(
        1, 2
    )
    low = low.transpose(0, 1).reshape(*shape, -1)
    return linear(ops.q8(low) if quantize else low, weights[f"{prefix}wo_b.weight"])


def mixes(
    weights: Weights, prefix: str, streams: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre of the next sublayer, post and mixing matrix of this one."""
    z = linear(streams.flatten(1).float(), weights[f"{prefix}_fn"]) * ops.inverse_rms(streams)
    pre, post, comb = ops.split_mixes(
        z, weights[f"{prefix}_base"], weights[f"{prefix}_scale"], config.hc_mult, config.hc_eps
    )
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = ops.balance(comb, config.hc_eps)
    return pre, post, comb


def moe(
    weights: Weights, prefix: str, x: Tensor, config: ModelConfig, top_k: int, *, quantize: bool
) -> tuple[Tensor, Tensor]:
    """All experts as one product, gates 0 for those not chosen; also each expert's share of choices."""
    scores = ops.route_scores(
        linear(x.float(), weights[f"{prefix}gate.weight"].float()) / config.gate_temp
    )
    with torch.no_grad():
        chosen = torch.topk(scores + weights[f"{prefix}gate.bias"], top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        load = mask.mean(0)
    kept = scores * mask
    gates = kept / (kept.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    gates = torch.cat((gates, torch.ones_like(gates[:, :1])), 1)
    xq = ops.q8(x) if quantize else x

    def all_experts(name: str) -> Tensor:
        return torch.cat(
            (
                weights[f"{prefix}experts.{name}.weight"],
                weights[f"{prefix}shared_experts.{name}.weight"].unsqueeze(0),
            )
        )

    count = gates.shape[1]
    u = linear(xq, all_experts("w1").flatten(0, 1)).unflatten(-1, (count, -1))
    v = linear(xq, all_experts("w3").flatten(0, 1)).unflatten(-1, (count, -1))
    active = ops.swiglu(u, v, gates, config.swiglu_limit).flatten(1)
    active = ops.q8(active) if quantize else active
    return active @ all_experts("w2").transpose(1, 2).flatten(0, 1), load
