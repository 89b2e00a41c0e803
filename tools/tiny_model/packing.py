"""Packs samples into rows of equal length, and makes such rows in worker processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from tools.tiny_model.data.mix import Mixture
from tools.tiny_model.render import Renderer, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

#: Samples start at multiples of this, so that pairs of ratio 2 and candidate blocks line up.
ALIGNMENT = 8
_OPEN_ROWS = 8
_PAD_ID = 2
_REPLAY_WINDOW = 128
#: Answers of this many tokens weigh 1 a token; longer ones less, shorter ones more, within limits.
_TYPICAL_ANSWER = 16


@dataclass(slots=True, eq=False)
class Row:
    """A packed row under construction.

    Attributes:
        ids: Token ids.
        target: Id that follows each position inside its sample.
        weight: Loss weight of each target.
        start: First position of each token's sample.
        floor: Cut of the bounded replay.
        spans: (task, first answer position, end) of every sample.
        used: Positions taken.
    """

    ids: NDArray[np.int32]
    target: NDArray[np.int32]
    weight: NDArray[np.float32]
    start: NDArray[np.int32]
    floor: NDArray[np.int32]
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    used: int = 0


def empty_row(length: int) -> Row:
    """A row of padding."""
    ids = np.full(length, _PAD_ID, dtype=np.int32)
    zeros = np.zeros(length, dtype=np.int32)
    return Row(ids, ids.copy(), np.zeros(length, dtype=np.float32), zeros, zeros.copy())


def place(row: Row, sample: Sample) -> None:
    """Append a sample to a row that has room for it."""
    first, size = row.used, len(sample.ids)
    padded = min(-(-size // ALIGNMENT) * ALIGNMENT, len(row.ids) - first)
    row.ids[first : first + size] = sample.ids
    row.target[first : first + size - 1] = sample.ids[1:]
    answer = size - sample.prompt_len
    row.weight[first : first + sample.prompt_len - 1] = sample.prompt_weight
    if sample.prompt_len > 1:
        row.weight[first + sample.prompt_len - 1 : first + size - 1] = min(
            2.0, max(0.4, (_TYPICAL_ANSWER / answer) ** 0.5)
        )
    else:
        row.weight[first : first + size - 1] = sample.prompt_weight
    row.start[first : first + padded] = first
    row.floor[first : first + padded] = first + max(0, sample.prompt_len - _REPLAY_WINDOW)
    row.spans.append((sample.task, first + sample.prompt_len, first + size))
    row.used = first + padded


def pack(samples: Iterator[Sample], length: int) -> Iterator[Row]:
    """Rows from an endless or finite stream; too long samples are left out."""
    open_rows: list[Row] = []
    for sample in samples:
        size = len(sample.ids)
        if size > length:
            continue
        fitting = [row for row in open_rows if length - row.used >= size]
        if not fitting:
            if len(open_rows) == _OPEN_ROWS:
                fullest = max(open_rows, key=lambda row: row.used)
                open_rows.remove(fullest)
                yield fullest
            open_rows.append(empty_row(length))
            fitting = [open_rows[-1]]
        place(max(fitting, key=lambda row: row.used), sample)
    yield from open_rows


FIELDS = ("ids", "target", "weight", "start", "floor")


def stack(rows: list[Row]) -> dict[str, NDArray[Any]]:
    """One array per field, [rows, length]."""
    return {name: np.stack([getattr(row, name) for row in rows]) for name in FIELDS}


def stream(tokenizer_file: Path, seed: int, length: int) -> Iterator[Row]:
    """Endless training rows of one seed."""
    renderer = Renderer(tokenizer_file)
    mixture = Mixture(seed, row_length=length)
    rng = Random(seed + 1)

    def samples() -> Iterator[Sample]:
        while True:
            yield renderer.sample(mixture.example(), rng)

    return pack(samples(), length)


class Loader:
    """Worker processes that keep a queue of batches full."""

    def __init__(
        self, tokenizer_file: Path, *, seed: int, length: int, rows: int, workers: int
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._queue: multiprocessing.Queue[dict[str, NDArray[Any]]] = context.Queue(4 * workers)
        self._processes = [
            context.Process(
                target=_work,
                args=(self._queue, tokenizer_file, seed * 1000 + i, length, rows),
                daemon=True,
            )
            for i in range(workers)
        ]
        for process in self._processes:
            process.start()

    def next(self) -> dict[str, NDArray[Any]]:
        """The next batch, [rows, length] per field."""
        return self._queue.get(timeout=120)

    def waiting(self) -> int:
        """Batches ready."""
        return self._queue.qsize()

    def close(self) -> None:
        """End the workers; what they have queued is dropped."""
        for process in self._processes:
            process.kill()
        self._queue.close()
        self._queue.cancel_join_thread()


def _work(out: Any, tokenizer_file: Path, seed: int, length: int, rows: int) -> None:
    source = stream(tokenizer_file, seed, length)
    while True:
        out.put(stack([next(source) for _ in range(rows)]))
