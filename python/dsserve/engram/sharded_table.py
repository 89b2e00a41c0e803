"""A table split by row range over the ranks of a node; every rank reads the others' parts directly.

Rank r owns rows [r * ceil(N / n), ..). On the CPU a peer's part is its shared memory, mapped; there is no collective
and no message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dsserve.engram.host_table import load_rows, row_arrays

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

    from dsserve.engram.peers import Peers
    from dsserve.engram.shared import SharedFolder
    from dsserve.engram.table import EngramStats, RowBytes, RowSource, TableShape


class ShardedTable:
    """Reads each row from the part of the rank that owns it."""

    def __init__(
        self, shape: TableShape, parts: list[mmap.mmap], peers: Peers, stats: EngramStats
    ) -> None:
        """Read rows from one map per rank, each of `shard_shape` bytes."""
        self._shape = shape
        self._part_rows = shard_shape(shape, len(parts)).num_rows
        self._parts = [row_arrays(part, shard_shape(shape, len(parts))) for part in parts]
        self._peers, self._stats = peers, stats

    @property
    def shape(self) -> TableShape:
        """Its size."""
        return self._shape

    def read(self, rows: NDArray[np.int64]) -> RowBytes:
        """Copies of some rows."""
        self._peers.check()
        codes = np.empty((len(rows), self._shape.width), dtype=np.uint8)
        scales = np.empty((len(rows), self._shape.scale_width), dtype=np.uint8)
        owner, local = np.divmod(rows, self._part_rows)
        for rank, (part_codes, part_scales) in enumerate(self._parts):
            mine = np.flatnonzero(owner == rank)
            if not len(mine):
                continue
            codes[mine] = part_codes.take(local[mine], axis=0)
            scales[mine] = part_scales.take(local[mine], axis=0)
            if rank != self._peers.rank:
                self._stats.peer_bytes += len(mine) * self._shape.row_bytes
        return codes, scales


def shard_shape(shape: TableShape, num_ranks: int) -> TableShape:
    """Size of one rank's part; the last parts are padded to it."""
    return replace(shape, num_rows=-(-shape.num_rows // num_ranks))


def open_sharded_tables(
    shapes: list[TableShape],
    folder: SharedFolder,
    peers: Peers,
    source: RowSource,
    stats: EngramStats,
    *,
    timeout_s: float,
) -> list[ShardedTable]:
    """Load this rank's part of every table, wait for the others, and map their parts.

    Raises:
        ConfigError: There is not enough shared memory, or another rank failed.
        EngramPeerLost: Another rank died.
    """
    ranks = range(peers.num_ranks)
    own = []
    for index, shape in enumerate(shapes):
        part = shard_shape(shape, peers.num_ranks)
        memory = folder.allocate(_part_name(index, peers.rank), part.num_bytes)
        first = min(peers.rank * part.num_rows, shape.num_rows)
        num_rows = min(part.num_rows, shape.num_rows - first)
        load_rows(source, index, memory, part, first=first, num_rows=num_rows)
        own.append(memory)
    peers.ready()
    peers.wait_ready(ranks, timeout_s=timeout_s)
    peers.watch()
    return [
        ShardedTable(
            shape,
            [
                own[index]
                if rank == peers.rank
                else folder.map(
                    _part_name(index, rank), shard_shape(shape, peers.num_ranks).num_bytes
                )
                for rank in ranks
            ],
            peers,
            stats,
        )
        for index, shape in enumerate(shapes)
    ]


def _part_name(table: int, rank: int) -> str:
    return f"table.{table}.part.{rank}"
