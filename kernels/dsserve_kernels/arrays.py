"""Numpy views of small tensors, for CPU bodies whose cost is that of calling.

A decode step touches a few hundred numbers per operator. There a numpy call costs a third of a torch call, so the
bodies named `numpy` do additions, products, quotients and reciprocal square roots, which torch too rounds as IEEE 754
says, in numpy, and leave sums over a row, square roots and transcendental functions to the torch functions of the
reference. Calls with many elements are the reference's, or are taken some rows at a time where that is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsserve_kernels.reference.math import LANES
from dsserve_kernels.registry import REGISTRY, Implementation

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.registry import Body

    Float32 = NDArray[np.float32]
    Float64 = NDArray[np.float64]

#: Elements up to which a numpy body runs itself (measured: equal cost near 10^5 elements).
MAX_ELEMENTS = 1 << 16


def is_small(x: Tensor) -> bool:
    """Whether a numpy body should run itself; an empty call is the reference's."""
    return 0 < x.numel() <= MAX_ELEMENTS


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Consecutive rows, as many at a time as make a small call of so many columns; temporaries stay in the cache."""
    step = max(MAX_ELEMENTS // columns, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def widened(x: Tensor) -> Float32:
    """The values of a float32 or BF16 tensor; of a float32 tensor its own memory."""
    array: Float32 = x.float().numpy()
    return array


def rounded(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A tensor of the values, rounded to `dtype`; shares memory where the dtype is the same."""
    return torch.from_numpy(array).to(dtype)


def narrowed(product: Tensor, dtype: torch.dtype) -> Float32:
    """The values of a product after rounding to `dtype`."""
    return widened(product.to(dtype))


def in_lanes(function: Callable[[Tensor], Tensor], array: Float32) -> Float32:
    """As `reference.math._in_lanes`: elementwise, on a whole number of vector lanes."""
    count = array.size
    missing = -count % LANES
    if missing == 0:
        flat = np.ascontiguousarray(array)
        result: Float32 = function(torch.from_numpy(flat)).numpy()
        return result
    lanes = np.zeros(count + missing, dtype=np.float32)
    lanes[:count].reshape(array.shape)[...] = array
    padded: Float32 = function(torch.from_numpy(lanes)).numpy()
    return padded[:count].reshape(array.shape)


def mean_square(wide: Tensor) -> Float32:
    """As `reference.math.mean_square`; torch sums, in its order."""
    total: Float32 = (wide * wide).sum(-1, keepdim=True).numpy()
    return total / np.float32(wide.shape[-1])


def register(body: Body, numerics: tuple[str, ...] = ("released", "fp32", "fast")) -> None:
    """Register a function as the `numpy` body of the operator of its name."""
    REGISTRY.add(Implementation(body.__name__, "numpy", body, ("cpu",), numerics))
