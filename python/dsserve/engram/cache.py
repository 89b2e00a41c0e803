"""Hot rows kept on the device: direct-mapped by row, filled on a miss.

A look-up hits if the row lay in the cache before the step asked for it. The rows of one look-up are distinct, so a
row that many tokens of a step want counts once, as a hit or as a miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsserve.engram.table import ReadTimer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsserve.engram.table import EngramStats, EngramTable, RowBytes, TableShape


def cached_row_bytes(shape: TableShape) -> int:
    """Bytes that a place of the cache takes: the row and its key."""
    return shape.row_bytes + 8


class RowCache:
    """Rows of all tables in one array; used by the staging thread alone."""

    def __init__(self, tables: list[EngramTable], num_rows: int, stats: EngramStats) -> None:
        """An empty cache of `num_rows` rows before some tables of the same width."""
        shape = tables[0].shape
        self._tables = tables
        sizes = [table.shape.num_rows for table in tables]
        #: Row r of table i has key `first_keys[i] + r`.
        self._first_keys = np.cumsum([0, *sizes])[:-1]
        self._keys = np.full(num_rows, -1, dtype=np.int64)
        self._codes = np.zeros((num_rows, shape.width), dtype=np.uint8)
        self._scales = np.zeros((num_rows, shape.scale_width), dtype=np.uint8)
        self._stats = stats

    def read(self, table: int, rows: NDArray[np.int64]) -> RowBytes:
        """Copies of distinct rows [n] of one table."""
        keys = rows + self._first_keys[table]
        places = keys % len(self._keys)
        is_hit = self._keys[places] == keys
        missing = np.flatnonzero(~is_hit)
        self._stats.cache_hits += len(rows) - len(missing)
        self._stats.cache_misses += len(missing)
        codes, scales = self._codes.take(places, axis=0), self._scales.take(places, axis=0)
        if len(missing):
            with ReadTimer(self._stats):
                codes[missing], scales[missing] = self._tables[table].read(rows[missing])
            self._fill(keys, places, missing, codes, scales)
        return codes, scales

    def _fill(
        self,
        keys: NDArray[np.int64],
        places: NDArray[np.int64],
        missing: NDArray[np.int64],
        codes: NDArray[np.uint8],
        scales: NDArray[np.uint8],
    ) -> None:
        """Put rows in; of several that share a place, the first stays."""
        filled, first = np.unique(places[missing], return_index=True)
        kept = missing[first]
        self._keys[filled] = keys[kept]
        self._codes[filled] = codes[kept]
        self._scales[filled] = scales[kept]
