"""Mixture of experts of one layer (model.md section 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsserve.models.deepseek_v4.params import by_columns
from dsserve_kernels.fused.weights import Experts

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.config.model import ModelConfig
    from dsserve.models.deepseek_v4.params import Params
    from dsserve.models.deepseek_v4.step import Step


class MoE:
    """Router, routed experts and the shared expert."""

    def __init__(
        self, config: ModelConfig, params: Params, layer: int, *, num_experts: int, top_k: int
    ) -> None:
        """`params` is the view of the layer's `ffn`."""
        self._ops, self._layer = params.ops, layer
        experts = [params.under(f"experts.{i}") for i in range(num_experts)]
        shared = params.under("shared_experts")
        self._weights = Experts(
            gate=params.matrix("gate.weight"),
            bias=params.float32("gate.bias").unsqueeze(0),
            w13=by_columns(
                torch.stack(
                    [torch.cat((e.fp4_weight("w1"), e.fp4_weight("w3"))) for e in experts]
                    + [torch.cat((shared.fp8_weight("w1"), shared.fp8_weight("w3")))]
                )
            ),
            w2=by_columns(
                torch.stack([e.fp4_weight("w2") for e in experts] + [shared.fp8_weight("w2")])
            ),
            top_k=top_k,
            scale=config.routed_scaling_factor,
            temperature=config.gate_temp,
            limit=config.swiglu_limit,
            quantize=params.numerics.quantize_activations,
        )

    def forward(self, x: Tensor, step: Step, *, is_tail: bool) -> Tensor:
        """[T, D] -> [T, D]; the sum of all experts is rounded once."""
        y, ids, weights = self._ops.experts(self._ops, x, self._weights)
        step.record("route_ids", self._layer, ids, is_tail=is_tail)
        step.record("route_w", self._layer, weights, is_tail=is_tail)
        result: Tensor = y
        return result
