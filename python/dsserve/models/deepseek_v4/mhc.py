"""The residual streams of a block: single-pass mHC around a sublayer (model.md section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.config.model import ModelConfig
    from dsserve.models.deepseek_v4.params import Params
    from dsserve_kernels.select import Operators

#: Added to the mean of squares of the flattened streams (a constant of section 4).
STAT_EPS = 1e-20


class HyperConnection:
    """Gates and mixing matrix of one sublayer."""

    def __init__(self, config: ModelConfig, params: Params, sublayer: str) -> None:
        """Prepare the projection of `sublayer` (`attn` or `ffn`)."""
        self._ops: Operators = params.ops
        self._fn = params.matrix(f"hc_{sublayer}_fn")
        self._base = params.float32(f"hc_{sublayer}_base")
        self._scale = params.float32(f"hc_{sublayer}_scale")
        self._num_streams = config.hc_mult
        self._rounds = config.hc_sinkhorn_iters
        self._eps = config.hc_eps

    def mixes(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pre [T, n] of the NEXT sublayer, post [T, n] and comb [T, n, n] of this one."""
        z = self._ops.hc_stats(streams, self._fn, STAT_EPS)
        pre, post, comb = self._ops.hc_split_sinkhorn(
            z,
            self._base,
            self._scale,
            num_streams=self._num_streams,
            rounds=self._rounds,
            eps=self._eps,
        )
        return pre, post, comb
