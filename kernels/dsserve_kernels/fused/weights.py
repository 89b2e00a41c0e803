"""Weights and constants of the fused operators, one object per layer and operator.

`prepared` belongs to the selected body: what it made of the tensors at its first call (views, other layouts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class SublayerInput:
    """How the residual streams enter a sublayer.

    Attributes:
        norm: [D] float32, weight of the RMSNorm before the sublayer.
        norm_eps: Its epsilon.
        fn: [n * (n + 2), n * D], projection of the mixes.
        base: [n * (n + 2)] float32.
        scale: [3] float32.
        num_streams: n.
        rounds: Sinkhorn rounds.
        eps: `hc_eps`.
        stat_eps: Added to the mean of squares of the streams.
    """

    norm: Tensor
    norm_eps: float
    fn: Tensor
    base: Tensor
    scale: Tensor
    num_streams: int
    rounds: int
    eps: float
    stat_eps: float
    prepared: Any = None


@dataclass(slots=True, eq=False)
class AttentionInput:
    """From a layer's input to queries and the latent of the window row (model.md section 5).

    Attributes:
        input: [r + d, D] `wq_a` above `wkv`, FP8 linears.
        query: [H * d, r] `wq_b`, an FP8 linear.
        query_norm: [r] float32.
        latent_norm: [d] float32.
        eps: Of both norms.
        num_heads: H.
        quantize: `Q8` on the inputs of both products.
    """

    input: Tensor
    query: Tensor
    query_norm: Tensor
    latent_norm: Tensor
    eps: float
    num_heads: int
    quantize: bool
    prepared: Any = None


@dataclass(slots=True, eq=False)
class AttentionOutput:
    """From the heads' values to the layer's output.

    Attributes:
        group: [G, o, H / G * d] `wo_a`; its input is not quantised.
        output: [D, G * o] `wo_b`, an FP8 linear.
        quantize: `Q8` on the input of `output`.
    """

    group: Tensor
    output: Tensor
    quantize: bool
    prepared: Any = None


@dataclass(slots=True, eq=False)
class Experts:
    """Router, routed experts and the shared expert (model.md section 8).

    Attributes:
        gate: [E, D].
        bias: [1, E] float32.
        w13: [E + 1, 2F, D]; the shared expert is the last.
        w2: [E + 1, D, F].
        top_k: Routed experts of a row.
        scale: `routed_scaling_factor`.
        temperature: `gate_temp`.
        limit: `swiglu_limit`.
        quantize: `Q8` on the inputs of the experts' products.
    """

    gate: Tensor
    bias: Tensor
    w13: Tensor
    w2: Tensor
    top_k: int
    scale: float
    temperature: float
    limit: float
    quantize: bool
    prepared: Any = None
