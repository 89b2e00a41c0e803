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
        self._gate = params.raw("gate.weight").double()
        self._bias = params.float32("gate.bias").unsqueeze(0)
        experts = [params.under(f"experts.{i}") for i in range(num_experts)]
        self._w13 = torch.stack(
            [torch.cat((e.fp4_weight("w1"), e.fp4_weight("w3"))) for e in experts]
        )
        self._w2 = torch.stack([e.fp4_weight("w2") for e in experts])
        shared = params.under("shared_experts")
        self._shared_in = shared.fp8_linear("w1", "w3")
        self._shared_out = shared.fp8_linear("w2")

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
        quantize = self._numerics.quantize_activations
        routed = self._ops.moe_routed(
            x, ids, weights, self._w13, self._w2, limit=self._limit, quantize=quantize
        )
        gate, up = self._shared_in(x).chunk(2, dim=1)
        shared = self._shared_out(self._ops.swiglu(gate, up, self._limit, None, x.dtype))
        result: Tensor = (routed + shared.float()).to(x.dtype)
        return result
