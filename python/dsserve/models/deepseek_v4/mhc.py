"""The residual streams of a block: single-pass mHC around a sublayer (model.md section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve_kernels.fused.chains import mixes
from dsserve_kernels.fused.weights import SublayerInput

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.config.model import ModelConfig
    from dsserve.models.deepseek_v4.params import Params
    from dsserve_kernels.select import Operators

#: Added to the mean of squares of the flattened streams (a constant of section 4).
STAT_EPS = 1e-20


class HyperConnection:
    """Gates and mixing matrix of one sublayer, and the norm in front of it."""

    def __init__(self, config: ModelConfig, params: Params, sublayer: str) -> None:
        """Prepare the projection and the norm of `sublayer` (`attn` or `ffn`)."""
        self._ops: Operators = params.ops
        self._norm = params.norm(f"{sublayer}_norm")
        self._weights = SublayerInput(
            norm=self._norm.weight,
            norm_eps=self._norm.eps,
            fn=params.matrix(f"hc_{sublayer}_fn"),
            base=params.float32(f"hc_{sublayer}_base"),
            scale=params.float32(f"hc_{sublayer}_scale"),
            num_streams=config.hc_mult,
            rounds=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            stat_eps=STAT_EPS,
        )

    def enter(self, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input x [T, D] of the sublayer, and the results of `mixes`; `pre` is that of the sublayer before."""
        x, next_pre, post, comb = self._ops.sublayer_input(self._ops, streams, pre, self._weights)
        return x, next_pre, post, comb

    def input(self, streams: Tensor, pre: Tensor) -> Tensor:
        """The first result of `enter` alone."""
        return self._norm(self._ops.hc_collapse(streams, pre))

    def mixes(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pre [T, n] of the NEXT sublayer, post [T, n] and comb [T, n, n] of this one."""
        return mixes(self._ops, streams, self._weights)
