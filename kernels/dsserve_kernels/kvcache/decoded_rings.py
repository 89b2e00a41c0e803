"""Values of the window rings that were read last, so that a decode step decodes only the rows that changed.

A ring is compared with the bytes its values were made of at every use: whoever wrote them, the values are those of the
pool. Comparing the 70 KiB of a ring takes a twentieth of the time of decoding them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.kvcache.numpy_rows import window_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsserve_kernels.arrays import Float32


_EXPONENT, _LOW, _SHIFT = np.uint32(0x7F800000), np.uint32(0xFFFF), np.uint32(16)


class Ring:
    """One ring as it was last seen.

    Attributes:
        values: [ring rows, d] BF16; zeros for broken rows.
        is_broken: [ring rows] rows that hold something else than finite BF16 numbers.
        num_broken: How many those are.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        # Zero bytes are zeros.
        self._raw = np.zeros((num_rows, row_bytes), dtype=np.uint8)
        self._is_whole_words = self._raw.size % 8 == 0
        self._words = self._as_words(self._raw)
        self._high: NDArray[np.uint16] = np.zeros((num_rows, row_bytes * 32 // 33), dtype=np.uint16)
        self.values = torch.from_numpy(self._high).view(torch.bfloat16)
        self.is_broken: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self.num_broken = 0

    def _as_words(self, raw: NDArray[np.uint8]) -> NDArray[np.generic]:
        return raw.reshape(-1).view(np.int64) if self._is_whole_words else raw.reshape(-1)

    def update(self, raw: NDArray[np.uint8]) -> None:
        """Make the values those of the bytes [ring rows, row bytes], which are contiguous."""
        if (self._as_words(raw) == self._words).all():
            return
        changed = np.flatnonzero((raw != self._raw).any(1))
        self._raw[changed] = raw[changed]
        bits = window_values(raw[changed]).view(np.uint32)
        # Not finite, or with more bits than BF16 has: a scale of its least exponents.
        is_broken = ((bits & _EXPONENT == _EXPONENT) | (bits & _LOW != 0)).any(1)
        bits[is_broken] = 0
        self._high[changed] = bits >> _SHIFT
        self.is_broken[changed] = is_broken
        self.num_broken = int(self.is_broken.sum())

    def put(self, row: int, raw: NDArray[np.uint8], values: Float32) -> None:
        """A row that is written to the pool now; its values are finite."""
        self._raw[row] = raw
        self._high[row] = values.view(np.uint32) >> _SHIFT
        if self.num_broken:
            self.is_broken[row] = False
            self.num_broken = int(self.is_broken.sum())


def ring_bytes(num_rows: int, row_bytes: int) -> int:
    """Memory of a `Ring`."""
    return num_rows * (row_bytes + 2 * (row_bytes * 32 // 33))


class DecodedRings:
    """The rings of one window pool that were used last."""

    def __init__(self, ring_rows: int, max_rings: int) -> None:
        """Remember at most `max_rings` rings of so many rows."""
        self._ring_rows, self.max_rings = ring_rows, max_rings
        self._rings: OrderedDict[int, Ring] = OrderedDict()

    def ring(self, pool: NDArray[np.uint8], number: int) -> Ring:
        """The ring of that number in the pool [rows, row bytes], as the pool holds it now."""
        first = number * self._ring_rows
        raw = pool[first : first + self._ring_rows]
        ring = self._rings.get(number)
        if ring is None:
            if len(self._rings) >= self.max_rings:
                _, ring = self._rings.popitem(last=False)
            else:
                ring = Ring(*raw.shape)
            self._rings[number] = ring
        else:
            self._rings.move_to_end(number)
        ring.update(raw)
        return ring
