"""One copy of a table per node, in shared memory that every rank maps; rank 0 loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsserve.engram.table import PAD_SCALE, Codes, RowBytes, TableShape

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

    from dsserve.engram.peers import Peers
    from dsserve.engram.shared import SharedFolder
    from dsserve.engram.table import RowSource

#: Rows loaded at a time (weights.md section 4).
CHUNK_ROWS = 1 << 16


class HostTable:
    """Reads the node's copy."""

    def __init__(self, shape: TableShape, memory: mmap.mmap, peers: Peers) -> None:
        """Read rows from a map of `shape.num_bytes` bytes."""
        self._shape = shape
        self._codes, self._scales = row_arrays(memory, shape)
        self._peers = peers

    @property
    def shape(self) -> TableShape:
        """Its size."""
        return self._shape

    def read(self, rows: NDArray[np.int64]) -> RowBytes:
        """Copies of some rows."""
        self._peers.check()
        return self._codes.take(rows, axis=0), self._scales.take(rows, axis=0)


def open_host_tables(
    shapes: list[TableShape],
    folder: SharedFolder,
    peers: Peers,
    source: RowSource,
    *,
    timeout_s: float,
) -> list[HostTable]:
    """Load the tables as rank 0, or wait for rank 0 and map them.

    Raises:
        ConfigError: There is not enough shared memory, or rank 0 failed.
        EngramPeerLost: Rank 0 died.
    """
    names = [f"table.{index}" for index in range(len(shapes))]
    if peers.rank == 0:
        maps = [
            folder.allocate(name, shape.num_bytes)
            for name, shape in zip(names, shapes, strict=True)
        ]
        for index, (memory, shape) in enumerate(zip(maps, shapes, strict=True)):
            load_rows(source, index, memory, shape, first=0, num_rows=shape.num_rows)
    else:
        peers.wait_ready([0], timeout_s=timeout_s)
        maps = [
            folder.map(name, shape.num_bytes) for name, shape in zip(names, shapes, strict=True)
        ]
    peers.ready()
    peers.watch()
    return [HostTable(shape, memory, peers) for shape, memory in zip(shapes, maps, strict=True)]


def row_arrays(memory: mmap.mmap, shape: TableShape) -> RowBytes:
    """Codes [rows, width], then scales [rows, width / 32], on mapped memory."""
    num_codes = shape.num_rows * shape.width
    codes: Codes = np.frombuffer(memory, np.uint8, count=num_codes)
    scales: Codes = np.frombuffer(
        memory, np.uint8, count=shape.num_rows * shape.scale_width, offset=num_codes
    )
    return (
        codes.reshape(shape.num_rows, shape.width),
        scales.reshape(shape.num_rows, shape.scale_width),
    )


def load_rows(
    source: RowSource,
    table: int,
    memory: mmap.mmap,
    shape: TableShape,
    *,
    first: int,
    num_rows: int,
) -> None:
    """Fill mapped memory with rows of a table, `CHUNK_ROWS` at a time.

    Args:
        source: Where they come from.
        table: Position in `engram_layer_ids`.
        memory: Map of `shape.num_bytes` bytes.
        shape: Size of the mapped part.
        first: First row of the table.
        num_rows: Rows to load; what is left of the part is padding.
    """
    codes, scales = row_arrays(memory, shape)
    for start in range(0, num_rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, num_rows)
        source.copy_rows(table, first + start, codes[start:stop], scales[start:stop])
    scales[num_rows:] = PAD_SCALE
