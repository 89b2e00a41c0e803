"""Linears by storage format; the weights are prepared once, when the model is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve_kernels.numerics import Numerics
    from dsserve_kernels.select import Operators


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A dense FP8 linear: its input is quantised to FP8 where the numeric policy says so."""

    ops: Operators
    numerics: Numerics
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[.., k] -> [.., n] in the dtype of `x`."""
        result: Tensor = self.ops.linear_fp8(
            x, self.weight, quantize=self.numerics.quantize_activations
        )
        return result


@dataclass(frozen=True, slots=True)
class Linear:
    """A BF16 linear."""

    ops: Operators
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[.., k] -> [.., n] in the dtype of `x`."""
        result: Tensor = self.ops.linear(x, self.weight)
        return result


@dataclass(frozen=True, slots=True)
class Fp32Linear:
    """A product whose result stays in FP32 (model.md section 2)."""

    ops: Operators
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[.., k] -> [.., n] float32."""
        result: Tensor = self.ops.linear_fp32(x, self.weight)
        return result


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """RMSNorm with its weight in FP32."""

    ops: Operators
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[.., n] -> [.., n] in the dtype of `x`."""
        result: Tensor = self.ops.rms_norm(x, self.weight, self.eps)
        return result
