"""From the floors of a plan's requests to those of its rows (replay.md sections 2, 4 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class RowFloors:
    """Floors of a step with T rows, of which T' run the decoder half.

    Attributes:
        encoder: [T] first position that the row's window sees in the layers before the last KV source.
        decoder: [T'] the same from the last KV source on.
        write: [T] first position whose compressed row the row may write: those below are shared and stay as they are.
    """

    encoder: NDArray[np.int64]
    decoder: NDArray[np.int64]
    write: NDArray[np.int64]


def row_floors(
    *,
    cu_seqlens: NDArray[np.int64],
    tail_len: NDArray[np.int64],
    window_floor: NDArray[np.int64],
    tail_floor: NDArray[np.int64],
    write_floor: NDArray[np.int64],
) -> RowFloors:
    """Spread the floors over the rows.

    Args:
        cu_seqlens: [B + 1] row ranges.
        tail_len: [B] last rows of each request that run the decoder half.
        window_floor: [B].
        tail_floor: [B].
        write_floor: [B].
    """
    lengths = np.diff(cu_seqlens)
    return RowFloors(
        encoder=np.repeat(np.maximum(window_floor, 0), lengths),
        decoder=np.repeat(np.maximum(tail_floor, 0), tail_len),
        write=np.repeat(write_floor, lengths),
    )
