"""Turns checkpoint tensors into the layers' prepared weights, each tensor used once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsserve.layers.linear import Fp8Linear, Fp32Linear, Linear, RmsNorm
from dsserve_kernels.reference.quant import dequantize_weight_fp4, dequantize_weight_fp8

if TYPE_CHECKING:
    from dsserve_kernels.numerics import Numerics
    from dsserve_kernels.select import Operators

#: Holds every dequantised weight exactly.
_WIDE = torch.float64
#: Elements up to which a weight is kept in float64 (8 MiB).
_SMALL_WEIGHT = 1 << 20


@dataclass(slots=True)
class Params:
    """A view of the checkpoint's tensors under a name prefix.

    Attributes:
        tensors: All tensors by checkpoint name.
        ops: Operators the built layers call.
        numerics: Numeric policy of the built layers.
        eps: `rms_norm_eps`.
        device: Where prepared weights go.
        prefix: Put before every name.
    """

    tensors: dict[str, Tensor]
    ops: Operators
    numerics: Numerics
    eps: float
    device: torch.device
    prefix: str = field(default="")

    def under(self, name: str) -> Params:
        """The view below `name`."""
        return Params(
            self.tensors, self.ops, self.numerics, self.eps, self.device, f"{self.prefix}{name}."
        )

    def raw(self, name: str) -> Tensor:
        """The stored tensor."""
        return self.tensors[self.prefix + name].to(self.device)

    def float32(self, name: str) -> Tensor:
        """A BF16 or F32 tensor, widened."""
        return self.raw(name).float()

    def matrix(self, name: str) -> Tensor:
        """A BF16 or F32 matrix, in the dtype that products read it in."""
        return _compact(self.raw(name))

    def fp8_weight(self, name: str) -> Tensor:
        """Dequantised FP8 weight [out, in]."""
        return _compact(
            dequantize_weight_fp8(self.raw(f"{name}.weight"), self.raw(f"{name}.scale"), _WIDE)
        )

    def fp4_weight(self, name: str) -> Tensor:
        """Dequantised FP4 weight [out, in]."""
        packed = self.raw(f"{name}.weight").view(torch.uint8)
        return _compact(dequantize_weight_fp4(packed, self.raw(f"{name}.scale"), _WIDE))

    def fp8_linear(self, *names: str) -> Fp8Linear:
        """One linear, or several of the same input stacked by rows."""
        weights = [self.fp8_weight(name) for name in names]
        return Fp8Linear(
            self.ops,
            self.numerics,
            by_columns(torch.cat(weights) if len(weights) > 1 else weights[0]),
        )

    def linear(self, name: str) -> Linear:
        """A BF16 linear."""
        return Linear(self.ops, self.matrix(f"{name}.weight"))

    def fp32_linear(self, *names: str) -> Fp32Linear:
        """A product that stays in FP32, possibly of several stacked weights."""
        return Fp32Linear(self.ops, torch.cat([self.matrix(f"{name}.weight") for name in names]))

    def norm(self, name: str) -> RmsNorm:
        """An RMSNorm."""
        return RmsNorm(self.ops, self.float32(f"{name}.weight"), self.eps)


def by_columns(weight: Tensor) -> Tensor:
    """The same weight [.., out, in], stored by columns if it is kept wide.

    A product of a few rows reads the weight of each input once, and takes half the time.
    """
    return weight.mT.contiguous().mT if weight.dtype == _WIDE else weight


def _compact(weight: Tensor) -> Tensor:
    """The weight in BF16 if it is large and that is exact, as it is for all but extreme scales.

    Operators widen weights as they use them. A large weight is bound by the bytes read; a small one, as in the tiny
    models, stays in the cache, and widening it at every use costs more than reading it wide.
    """
    if weight.numel() <= _SMALL_WEIGHT:
        return weight.to(_WIDE)
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight
