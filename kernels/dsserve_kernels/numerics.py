"""Where the forward rounds: the numeric policies of `--numerics`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Numerics:
    """A numeric policy; storage formats (window, compressed and index rows) are the same in all of them.

    Attributes:
        name: Value of `--numerics`.
        act_dtype: Type of every activation that crosses an operator (model.md section 2, rounding points).
        quantize_activations: Round the inputs of FP8 and FP4 linears to E4M3 per 32 columns (`Q8`).
        round_softmax_weights: Round exp(score - max) to BF16 before it multiplies the values (model.md section 5).
    """

    name: str
    act_dtype: torch.dtype
    quantize_activations: bool
    round_softmax_weights: bool


#: The released code's roundings; the numerics of `golden.safetensors`.
RELEASED = Numerics(
    "released", torch.bfloat16, quantize_activations=True, round_softmax_weights=True
)
#: No rounding of activations; the numerics of `golden_fp32.safetensors`.
FP32 = Numerics("fp32", torch.float32, quantize_activations=False, round_softmax_weights=False)

BY_NAME = {policy.name: policy for policy in (RELEASED, FP32)}
