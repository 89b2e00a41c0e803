"""Rows of the Engram tables for placements that load them apart from the other weights (weights.md section 4)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsserve.engram.table import table_shapes
from dsserve.errors import CheckpointError
from dsserve.models.deepseek_v4.checkpoint import Checkpoint
from dsserve.models.deepseek_v4.random_weights import draw_weights
from dsserve.models.deepseek_v4.tensors import expected_tensors
from dsserve.models.deepseek_v4.weights import NAN_SCALE, Progress, byte_view

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from dsserve.config.model import ModelConfig
    from dsserve.engram.table import Codes, RowSource


def table_names(config: ModelConfig) -> list[tuple[str, str]]:
    """Names of the codes and the scales of each table, in the order of `engram_layer_ids`."""
    prefixes = [f"layers.{layer}.engram.embed" for layer in config.engram_layer_ids]
    return [(f"{prefix}.weight", f"{prefix}.scale") for prefix in prefixes]


class CheckpointRows:
    """Copies row ranges out of the mapped shards; never reads a whole tensor. Use it as a context manager."""

    def __init__(
        self, path: Path, config: ModelConfig, *, layout: str = "", progress: Progress | None = None
    ) -> None:
        """Open the checkpoint and check it.

        Args:
            path: Checkpoint directory.
            config: Its configuration.
            layout: How the tables are placed, for the progress bar.
            progress: Told the bytes copied.

        Raises:
            CheckpointError: See `weights.load_checkpoint`.
        """
        self._checkpoint = Checkpoint(path)
        self._checkpoint.check(expected_tensors(config))
        self._names, self._shapes = table_names(config), table_shapes(config)
        self._progress, self._stage = progress, f"loading Engram tables ({layout})"
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._checkpoint.close()

    def copy_rows(self, table: int, first: int, codes: Codes, scales: Codes) -> None:
        """Fill the arrays with the rows of a table from `first` on.

        Raises:
            CheckpointError: If a scale is NaN.
        """
        for name, part in zip(self._names[table], (codes, scales), strict=True):
            file = self._checkpoint.file(name)
            file.copy_into(name, part.reshape(-1), start=first * part.shape[1])
            if part is scales and bool((part == NAN_SCALE).any()):
                raise CheckpointError(
                    f"{file.path}: tensor {name}: a scale is NaN (byte 255): the file is damaged; copy or "
                    "download it again"
                )
        self._done += codes.nbytes + scales.nbytes
        if self._progress is not None:
            self._progress(self._done, sum(shape.num_bytes for shape in self._shapes), self._stage)


class RandomRows:
    """Rows of random tables, the same as `weights.random_weights` draws; holds one table at a time."""

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        """Nothing is drawn yet."""
        self._config, self._seed = config, seed
        self._drawn: tuple[int, Codes, Codes] | None = None

    def copy_rows(self, table: int, first: int, codes: Codes, scales: Codes) -> None:
        """Fill the arrays with the rows of a table from `first` on."""
        if self._drawn is None or self._drawn[0] != table:
            self._drawn = (table, *self._draw(table))
        _, all_codes, all_scales = self._drawn
        codes[:] = all_codes[first : first + len(codes)]
        scales[:] = all_scales[first : first + len(scales)]

    def _draw(self, table: int) -> tuple[Codes, Codes]:
        expected = expected_tensors(self._config)
        names = table_names(self._config)[table]
        specs = {name: expected[name] for name in names}
        drawn = dict(draw_weights(specs, self._config, seed=self._seed))
        codes, scales = (byte_view(drawn[name]).reshape(specs[name].shape) for name in names)
        return codes, scales


@contextmanager
def row_source(
    path: Path,
    config: ModelConfig,
    *,
    load_format: str,
    seed: int,
    layout: str = "",
    progress: Progress | None = None,
) -> Iterator[RowSource]:
    """Rows by `--load-format`, as `weights.load_weights` gives the other tensors.

    Raises:
        CheckpointError: See `weights.load_checkpoint`.
    """
    if load_format == "dummy":
        yield RandomRows(config, seed=seed)
    else:
        with CheckpointRows(path, config, layout=layout, progress=progress) as source:
            yield source
