"""Mixture of experts of one layer (model.md section 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.models.deepseek_v4.params import Params
    from dsserve.models.deepseek_v4.step import Step


class MoE:
    """Router, routed experts and the shared expert."""

    def __init__(
        self, config: ModelConfig, params: Params, layer: int, *, num_experts: int, top_k: int
    ) -> None:
        """`params` is the view of the layer's `ffn`."""
        self._ops, self._numerics = params.ops, params.numerics
        self._layer, self._top_k = layer, top_k
        self._limit = config.swiglu_limit
        self._route_scale, self._temperature = config.routed_scaling_factor, config.gate_temp
        self._gate = params.matrix("gate.weight")
        self._bias = params.float32("gate.bias").unsqueeze(0)
        # The shared expert is one more that every row chooses: a row's inputs are quantised once for all, and as
        # the last id it comes last in the sum, with a weight of exactly one.
        experts = [params.under(f"experts.{i}") for i in range(num_experts)]
        shared = params.under("shared_experts")
        self._w13 = torch.stack(
            [torch.cat((e.fp4_weight("w1"), e.fp4_weight("w3"))) for e in experts]
            + [torch.cat((shared.fp8_weight("w1"), shared.fp8_weight("w3")))]
        )
        self._w2 = torch.stack([e.fp4_weight("w2") for e in experts] + [shared.fp8_weight("w2")])
        self._shared_id = torch.tensor([[num_experts]], device=params.device)
        self._shared_weight = torch.ones(1, 1, device=params.device)

    def forward(self, x: Tensor, step: Step, *, is_tail: bool) -> Tensor:
        """[T, D] -> [T, D]; the sum of all experts is rounded once."""
        ids, weights = self._ops.route_experts(
            x,
            self._gate,
            self._bias,
            top_k=self._top_k,
            scale=self._route_scale,
            temperature=self._temperature,
        )
        step.record("route_ids", self._layer, ids, is_tail=is_tail)
        step.record("route_w", self._layer, weights, is_tail=is_tail)
        rows = x.shape[0]
        result: Tensor = self._ops.moe_routed(
            x,
            torch.cat((ids, self._shared_id.expand(rows, 1)), dim=1),
            torch.cat((weights, self._shared_weight.expand(rows, 1)), dim=1),
            self._w13,
            self._w2,
            limit=self._limit,
            quantize=self._numerics.quantize_activations,
        )
        return result.to(x.dtype)
