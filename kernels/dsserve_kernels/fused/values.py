"""Arithmetic of a few rows on numpy arrays that hold BF16 numbers in float32; bit-equal to the reference operators.

Inside a fused body nothing is a torch tensor but what torch alone computes in its own way: sums of float32 and
transcendental functions of float32. Products run in float64 and are rounded once, so that their order does not
matter; numpy's products are used, whose calls on few rows cost a fraction of torch's.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.arrays import Float32, Float64

#: Rows up to which a fused body runs itself.
FEW_ROWS = 64

#: 2^16 + 1: splits a float32 after its eighth significant bit.
_SPLIT = np.float32(65537)
_FLOOR = np.float32(1e-4)
_INVERSE_MAX = np.float32(1.0 / 448.0)
_MAGNITUDE, _MANTISSA = np.int32(0x7FFFFFFF), np.int32(0x7FFFFF)
_EXPONENT = np.int32(0x7F800000)
#: From the bits of a power of two to those of 2^-6 times it: the least normal E4M3 number in units of the scale.
_TO_LEAST = np.int32(-(6 << 23))
#: From the bits of 2^e to those of 1.5 * 2^(e + 20): adding that number rounds to steps of 2^(e - 3).
_TO_ROUNDER = np.int32((20 << 23) + 0x400000)


def is_few(x: Tensor) -> bool:
    """Whether a fused body runs itself: some rows of BF16, but not many."""
    return x.dtype == torch.bfloat16 and 0 < x.shape[0] <= FEW_ROWS


def is_wide(*weights: Tensor) -> bool:
    """Whether all weights are kept in float64, as small ones are: those of large models are not widened at once."""
    return all(weight.dtype == torch.float64 for weight in weights)


def to_float32(x: Tensor) -> Float32:
    """The values of a BF16 tensor."""
    array: Float32 = x.float().numpy()
    return array


def to_bf16(values: NDArray[np.floating]) -> Tensor:
    """A BF16 tensor of the values, rounded."""
    return torch.from_numpy(values).bfloat16()


def round_bf16(x: Float32) -> Float32:
    """The nearest BF16 numbers, ties to even (Veltkamp's splitting).

    Not for magnitudes from 2^111 on, where the product overflows, nor below 2^-126, where BF16 has fewer bits.
    """
    high = x * _SPLIT
    rounded: Float32 = np.subtract(high, np.subtract(high, x), high)
    return rounded


def times(x: Float64, transposed: Float64) -> Float32:
    """[T, k] times [k, n], rounded to float32."""
    product: Float32 = np.matmul(x, transposed).astype(np.float32)
    return product


def round_fp8(x: Float32) -> Float64:
    """`Q8` of contiguous rows: the values after the round trip; only the sign of zeros is lost."""
    bits = x.view(np.int32).reshape(-1, 32)
    # Magnitudes are ordered as their bits are.
    scale = np.maximum.reduce(bits & _MAGNITUDE, 1).view(np.float32)
    np.maximum(scale, _FLOOR, out=scale)
    np.multiply(scale, _INVERSE_MAX, scale)
    least = scale.view(np.int32)
    np.add(least, _MANTISSA, least)
    np.bitwise_and(least, _EXPONENT, least)
    np.add(least, _TO_LEAST, least)
    power = bits & _EXPONENT
    np.maximum(power, least[:, None], out=power)
    np.add(power, _TO_ROUNDER, power)
    rounder = power.view(np.float32).reshape(x.shape)
    result = x + rounder
    np.subtract(result, rounder, result)
    return result.astype(np.float64)


def norm(x: Float32, weight: Float32, eps: np.float32) -> Float32:
    """RMSNorm [T, n], rounded to BF16."""
    result = x * inverse_root_mean_square(x, eps)
    return round_bf16(np.multiply(weight, result, result))


def inverse_root_mean_square(x: Float32, eps: np.float32) -> Float32:
    """[T, n] -> [T, 1]; torch sums, in its order."""
    total: Float32 = torch.from_numpy(x * x).sum(-1, keepdim=True).numpy()
    np.divide(total, np.float32(x.shape[-1]), total)
    np.add(total, eps, total)
    np.sqrt(total, total)
    return np.divide(np.float32(1), total, total)


#: Rotations made last, with the tensors they are of: all layers of a kind have the same one.
_ROTATIONS: deque[tuple[Tensor, Rotation]] = deque(maxlen=4)


def rotation_of(cos_sin: Tensor) -> Rotation:
    """The rotation of the table rows [T, r / 2, 2]; the same tensor is laid out once."""
    for known, rotation in _ROTATIONS:
        if known is cos_sin:
            return rotation
    rotation = Rotation(cos_sin)
    _ROTATIONS.appendleft((cos_sin, rotation))
    return rotation


class Rotation:
    """Rotary factors of some rows, laid out for pairs of neighbours."""

    def __init__(self, cos_sin: Tensor) -> None:
        """`cos_sin` is [T, r / 2, 2]."""
        table = cos_sin.numpy()
        self.num_rotated = 2 * table.shape[1]
        self._cos = np.repeat(table[..., 0], 2, axis=1)
        self._sin = np.repeat(table[..., 1], 2, axis=1)
        self._sin[:, 0::2] *= -1

    def turn(self, x: Float32, *, inverse: bool = False) -> Float32:
        """Rotate the last columns of [T, .., n] in place and round them to BF16; returns `x`."""
        pairs = x[..., -self.num_rotated :]
        cos, sin = self._cos, self._sin
        if x.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        halves = pairs.reshape(*pairs.shape[:-1], -1, 2)
        crossed = halves[..., ::-1].reshape(pairs.shape) * sin
        straight = pairs * cos
        # The inverse turns by the negative angle: its sine has the other sign, its cosine the same.
        combine = np.subtract if inverse else np.add
        pairs[...] = round_bf16(combine(straight, crossed, straight))
        return x
