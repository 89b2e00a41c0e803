"""The draft model once more, written from the specification alone: dense float64, one request, no operators of ours.

Storage formats are kept (window rows are FP8), nothing else is rounded: the numbers of `--numerics fp32`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class DraftOracle:
    """Base logits, hidden states, Markov logits and confidences of one block."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors
        self.last = f"mtp.{config.num_nextn_predict_layers - 1}."
        self.wide: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def fp8(self, name: str) -> Tensor:
        """An FP8 weight: one power-of-two scale for each 32 x 32 tile."""
        if name in self.wide:
            return self.wide[name]
        codes = self.tensors[f"{name}.weight"].double()
        scale = torch.exp2(self.tensors[f"{name}.scale"].double() - 127)
        tiles = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        self.wide[name] = codes * tiles[: codes.shape[0], : codes.shape[1]]
        return self.wide[name]

    def fp4(self, name: str) -> Tensor:
        """An FP4 weight: two codes a byte, even column in the low nibble, a scale for each 32 columns of a row."""
        packed = self.tensors[f"{name}.weight"].view(torch.uint8).long()
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        magnitude = torch.tensor(_E2M1, dtype=torch.float64)[codes & 7]
        scale = torch.exp2(self.tensors[f"{name}.scale"].double() - 127)
        return torch.where(codes >= 8, -magnitude, magnitude) * scale.repeat_interleave(32, 1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return self.value(f"{name}.weight") * x / (mean + self.config.rms_norm_eps).sqrt()

    def rope(self, x: Tensor, position: int, *, inverse: bool = False) -> Tensor:
        """Rotate adjacent pairs of the last features of one row [.., n]."""
        dim = self.config.qk_rope_head_dim
        pair = torch.arange(dim // 2, dtype=torch.float64)
        angle = position / self.config.rope_theta ** (2 * pair / dim)
        cos, sin = angle.cos(), angle.sin() * (-1 if inverse else 1)
        even, odd = x[..., -dim::2], x[..., 1 - dim :: 2]
        out = x.clone()
        out[..., -dim::2], out[..., 1 - dim :: 2] = even * cos - odd * sin, even * sin + odd * cos
        return out

    @staticmethod
    def stored(row: Tensor) -> Tensor:
        """A row [n] as FP8 storage gives it back."""
        blocks = row.view(-1, 32)
        top = blocks.abs().amax(1, keepdim=True).clamp_min(1e-4)
        scale = (top / 448).log2().ceil().exp2()
        return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten()

    def key(self, stage: int, x: Tensor, position: int) -> Tensor:
        """The key-value row of one input [D]."""
        prefix = f"mtp.{stage}.attn."
        latent = self.norm(self.fp8(f"{prefix}wkv") @ x, f"{prefix}kv_norm")
        return self.stored(self.rope(latent, position))

    def history(self, stage: int, taps: Tensor, positions: list[int]) -> list[Tensor]:
        """Rows of the target's taps [T, taps * D]."""
        project = self.fp8("mtp.0.main_proj")
        return [
            self.key(stage, self.norm(project @ tap.double(), "mtp.0.main_norm"), position)
            for tap, position in zip(taps, positions, strict=True)
        ]

    def block(
        self, anchor: int, position: int, taps: Tensor, positions: list[int], gamma: int
    ) -> tuple[Tensor, Tensor]:
        """Base logits [gamma, V] and hidden states [gamma, D]."""
        config = self.config
        ids = [anchor] + [config.dspark_noise_token_id] * (gamma - 1)
        streams = self.value("embed.weight")[ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre = torch.zeros(gamma, config.hc_mult, dtype=torch.float64)
        pre[:, 0] = 1
        for stage in range(config.num_nextn_predict_layers):
            prefix = f"mtp.{stage}."
            following, post, comb = self.mixes(f"{prefix}hc_attn", streams)
            x = self.norm(self.collapse(streams, pre), f"{prefix}attn_norm")
            y = self.attend(stage, x, position, self.history(stage, taps, positions))
            streams = self.expand(y, streams, post, comb)
            pre, post, comb = self.mixes(f"{prefix}hc_ffn", streams)
            x = self.norm(self.collapse(streams, following), f"{prefix}ffn_norm")
            y = torch.stack([self.experts(f"{prefix}ffn.", row) for row in x])
            streams = self.expand(y, streams, post, comb)
        hidden = self.collapse(streams, pre)
        return self.norm(hidden, f"{self.last}norm") @ self.value("head.weight").T, hidden

    def markov(self, base: Tensor, previous: int) -> Tensor:
        """Logits of a draft, given its base logits and the token before it."""
        embedded = self.value(f"{self.last}markov_head.embed.weight")[previous]
        return base + self.value(f"{self.last}markov_head.head.weight") @ embedded

    def confidence(self, hidden: Tensor, previous: int) -> float:
        embedded = self.value(f"{self.last}markov_head.embed.weight")[previous]
        weight = self.value(f"{self.last}confidence_head.proj.weight")[0]
        return float(weight @ torch.cat((hidden, embedded)))

    @staticmethod
    def collapse(streams: Tensor, pre: Tensor) -> Tensor:
        return torch.einsum("tn,tnd->td", pre, streams)

    @staticmethod
    def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return torch.einsum("tj,td->tjd", post, y) + torch.einsum("tij,tid->tjd", comb, streams)

    def mixes(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.config.hc_mult, self.config.hc_eps
        flat = streams.flatten(1)
        z = (
            flat
            @ self.value(f"{name}_fn").T
            / (flat.square().mean(-1, keepdim=True) + 1e-20).sqrt()
        )
        base, scale = self.value(f"{name}_base"), self.value(f"{name}_scale")
        pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (z[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre, post, comb

    def attend(self, stage: int, x: Tensor, position: int, history: list[Tensor]) -> Tensor:
        config, prefix = self.config, f"mtp.{stage}.attn."
        keys = torch.stack(
            history + [self.key(stage, row, position + i) for i, row in enumerate(x)]
        )
        sink = self.value(f"{prefix}attn_sink").unsqueeze(1)
        groups = config.o_groups
        wo_a = self.fp8(f"{prefix}wo_a").view(groups, config.o_lora_rank, -1)
        out = []
        for i, row in enumerate(x):
            low = self.norm(self.fp8(f"{prefix}wq_a") @ row, f"{prefix}q_norm")
            query = (self.fp8(f"{prefix}wq_b") @ low).view(config.num_attention_heads, -1)
            query = self.rope(query, position + i)
            scores = torch.cat((query @ keys.T / config.head_dim**0.5, sink), dim=1)
            values = scores.softmax(1)[:, :-1] @ keys
            values = self.rope(values, position + i, inverse=True).view(groups, -1)
            grouped = torch.einsum("gc,grc->gr", values, wo_a).flatten()
            out.append(self.fp8(f"{prefix}wo_b") @ grouped)
        return torch.stack(out)

    def experts(self, prefix: str, x: Tensor) -> Tensor:
        config = self.config
        scores = torch.nn.functional.softplus(
            self.value(f"{prefix}gate.weight") @ x / config.gate_temp
        ).sqrt()
        biased = scores + self.value(f"{prefix}gate.bias")
        chosen = biased.topk(config.dspark_num_experts_per_tok).indices.tolist()
        total = scores[chosen].sum()
        result = self.feed_forward(f"{prefix}shared_experts", x, self.fp8)
        for expert in chosen:
            weight = scores[expert] / total * config.routed_scaling_factor
            result += weight * self.feed_forward(f"{prefix}experts.{expert}", x, self.fp4)
        return result

    def feed_forward(self, name: str, x: Tensor, weight: object) -> Tensor:
        assert callable(weight)
        limit = self.config.swiglu_limit
        gate, up = weight(f"{name}.w1") @ x, weight(f"{name}.w3") @ x
        active = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        result: Tensor = weight(f"{name}.w2") @ active
        return result
