"""Rows on their way: a thread fetches what a step needs from the tables while other work goes on.

Row ids follow from token ids alone. Where the host knows all ids of a step (a prefill without placeholders), fetching
starts when the step is planned, before its forward; else at the head of the forward, as soon as the device has the
ids: then the first table's rows come while the layers before it run, and the others' while all layers before them do.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dsserve.engram.hashing import hash_rows
from dsserve.engram.table import ReadTimer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dsserve.engram.cache import RowCache
    from dsserve.engram.hashing import EngramConstants
    from dsserve.engram.table import Codes, EngramStats, EngramTable


@dataclass(frozen=True, slots=True, eq=False)
class FetchedRows:
    """Rows of one table for one step, each distinct row once.

    Attributes:
        codes: [u, width].
        scales: [u, width / 32].
        index: [T, columns] int64, which of the u rows each token reads.
    """

    codes: Codes
    scales: Codes
    index: NDArray[np.int64]


class StagedRows:
    """The rows of one step; `take` waits for those of a table."""

    def __init__(self, rows: NDArray[np.int64], tables: list[Future[FetchedRows]]) -> None:
        """Rows [T, tables, columns] that are being fetched."""
        self.rows = rows
        self._tables = tables

    def take(self, table: int) -> FetchedRows:
        """Rows of one table, by its position in `engram_layer_ids`.

        Raises:
            EngramPeerLost: A process that shares the table has died.
        """
        return self._tables[table].result()


class Stager:
    """Fetches rows on a thread of its own, step by step in the order of the calls."""

    def __init__(
        self, tables: Sequence[EngramTable], stats: EngramStats, cache: RowCache | None = None
    ) -> None:
        """Read from some tables, through a cache if there is one."""
        self._tables, self._stats, self._cache = list(tables), stats, cache
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engram staging")

    @property
    def stats(self) -> EngramStats:
        """Running totals."""
        return self._stats

    def start(self, rows: NDArray[np.int64]) -> StagedRows:
        """Begin to fetch the rows [T, tables, columns] of a step."""
        futures = [
            self._thread.submit(self._fetch, table, rows[:, table])
            for table in range(len(self._tables))
        ]
        return StagedRows(rows, futures)

    def close(self) -> None:
        """Drop what is queued and end the thread. A second call does nothing."""
        self._thread.shutdown(cancel_futures=True)

    def _fetch(self, table: int, rows: NDArray[np.int64]) -> FetchedRows:
        # Ascending rows are read faster than scattered ones, and a row that many tokens want is read once.
        distinct, index = np.unique(rows, return_inverse=True)
        self._stats.distinct_rows += len(distinct)
        if self._cache is not None:
            codes, scales = self._cache.read(table, distinct)
        else:
            with ReadTimer(self._stats):
                codes, scales = self._tables[table].read(distinct)
        return FetchedRows(codes, scales, index.reshape(rows.shape))


class EngramPlan(Protocol):
    """What a step plan tells of its ids.

    Attributes:
        token_ids: [T] ids, -1 = placeholder.
        positions: [T].
        cu_seqlens: [B + 1] row ranges.
        history_ids: [B, h] ids before each request's first row, the last one directly before it; -1 = before the start,
            -2 = the device knows it.
    """

    @property
    def token_ids(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def positions(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def cu_seqlens(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def history_ids(self) -> NDArray[np.int64]: ...  # noqa: D102


def planned_rows(constants: EngramConstants, plan: EngramPlan) -> NDArray[np.int64] | None:
    """Table rows of a step whose ids are all known, or None if the device has to tell some.

    Args:
        constants: Constants of the model.
        plan: The step.

    Returns:
        [T, tables, columns], the same as the operator `engram_hash` gives.
    """
    token_ids, cu_seqlens, history_ids = plan.token_ids, plan.cu_seqlens, plan.history_ids
    lookback = constants.multipliers.shape[1]
    if (token_ids < 0).any() or (history_ids < -1).any() or history_ids.shape[1] < lookback - 1:
        return None
    lengths = np.diff(cu_seqlens)
    request = np.repeat(np.arange(len(lengths)), lengths)
    # Every request's ids behind those before them, so that row t's predecessors lie directly before it.
    before = history_ids.shape[1]
    padded = np.full(len(token_ids) + before * len(lengths), -1, dtype=np.int64)
    place = np.arange(len(token_ids)) + before * (request + 1)
    padded[place] = token_ids
    padded[(cu_seqlens[:-1] + before * np.arange(len(lengths)))[:, None] + np.arange(before)] = (
        history_ids
    )
    back = np.arange(lookback)
    history = padded[place[:, None] - back]
    history[plan.positions[:, None] < back] = -1
    blocked = np.logical_or.accumulate(history < 0, axis=1)
    compressed = np.where(
        blocked, constants.pad_compressed_id, constants.token_map[np.maximum(history, 0)]
    )
    tables = [
        hash_rows(compressed, multipliers=multipliers, primes=primes, offsets=offsets)
        for multipliers, primes, offsets in zip(
            constants.multipliers, constants.primes, constants.offsets, strict=True
        )
    ]
    return np.stack(tables, axis=1)
