"""One Engram table as rows of bytes: its size, where its rows come from, how they are read; no torch here.

A row is `width` E4M3 codes and a UE8M0 scale for each 32 of them (model.md 7.3). Codes and scales lie in two arrays,
as in the checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig

Codes = NDArray[np.uint8]
#: Codes [n, width] and scales [n, width / 32] of some rows.
RowBytes = tuple[Codes, Codes]

#: Columns that share a scale.
SCALE_GROUP = 32
#: Scale of rows that pad the last shard: 2^0.
PAD_SCALE = 127


@dataclass(frozen=True, slots=True)
class TableShape:
    """Size of one table."""

    num_rows: int
    width: int

    @property
    def scale_width(self) -> int:
        """Scales of a row."""
        return -(-self.width // SCALE_GROUP)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row (264 for the released model)."""
        return self.width + self.scale_width

    @property
    def num_bytes(self) -> int:
        """Bytes of the table."""
        return self.num_rows * self.row_bytes


def table_shapes(config: ModelConfig) -> list[TableShape]:
    """Sizes of a model's tables, in the order of `engram_layer_ids`."""
    return [TableShape(rows, config.engram_head_dim) for rows in config.engram_num_embeddings]


class RowSource(Protocol):
    """Where tables are loaded from, a range of rows at a time."""

    def copy_rows(self, table: int, first: int, codes: Codes, scales: Codes) -> None:
        """Fill the arrays with the rows from `first` on.

        Args:
            table: Position in `engram_layer_ids`.
            first: First row.
            codes: [n, width], contiguous.
            scales: [n, width / 32], contiguous.
        """
        ...


class EngramTable(Protocol):
    """Reads rows of one table, wherever they lie."""

    @property
    def shape(self) -> TableShape:
        """Its size."""
        ...

    def read(self, rows: NDArray[np.int64]) -> RowBytes:
        """Copies of the rows [n], in the given order.

        Raises:
            EngramPeerLost: A process that shares the table has died.
        """
        ...


@dataclass(slots=True)
class EngramStats:
    """Running totals of one process.

    Attributes:
        placement: Where the tables lie.
        rows: Rows that planned steps ask for (columns of all tables, for every token).
        distinct_rows: Rows left once those that several tokens of a step ask for are counted once.
        cache_hits: Distinct rows that lay in the hot-row cache before the step asked.
        cache_misses: Distinct rows that did not.
        reads: Look-ups that went to the table.
        read_s: Seconds they took.
        peer_bytes: Bytes read from the parts of other ranks.
    """

    placement: str
    rows: int = 0
    distinct_rows: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    reads: int = 0
    read_s: float = 0.0
    peer_bytes: int = 0


class ReadTimer:
    """Adds the time of a block to the totals."""

    def __init__(self, stats: EngramStats) -> None:
        """Prepare."""
        self._stats = stats
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stats.reads += 1
        self._stats.read_s += time.perf_counter() - self._began_s
