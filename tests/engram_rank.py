"""One process of several that share Engram tables; started by `integration/test_engram_processes.py`.

Prints `ready DIGEST` (of rows that all ranks choose alike), then reads rows until a line comes in or a peer is lost,
prints `lost MESSAGE` or `refused MESSAGE`, and exits with one of the codes below. Without torch, so that it starts fast.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dsserve.config.model import load_model_config
from dsserve.engram import peers
from dsserve.engram.peers import EngramPeerLost
from dsserve.engram.placement import EngramOptions, open_tables
from dsserve.engram.table import table_shapes
from dsserve.errors import ConfigError
from dsserve.models.deepseek_v4.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsserve.config.model import ModelConfig
    from dsserve.engram.staging import Stager
    from dsserve.engram.table import Codes

STOPPED, LOST, REFUSED = 0, 7, 8
CHECKPOINT = Path(__file__).parent / "golden" / "data" / "v41-tiny-a"
NUM_CHECKS, TOKENS = 5, 30


class FileRows:
    """Row ranges of the checkpoint; may die or fail at the second one it is asked for."""

    def __init__(self, config: ModelConfig, trouble: str) -> None:
        self._file = SafetensorsFile(CHECKPOINT / "model.safetensors")
        self._layers = config.engram_layer_ids
        self._trouble = trouble
        self._calls = 0

    def copy_rows(self, table: int, first: int, codes: Codes, scales: Codes) -> None:
        self._calls += 1
        if self._calls == 2 and self._trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._calls == 2 and self._trouble == "fail":
            raise ConfigError("the disk is on fire")
        for leaf, part in (("weight", codes), ("scale", scales)):
            name = f"layers.{self._layers[table]}.engram.embed.{leaf}"
            self._file.copy_into(name, part.reshape(-1), start=first * part.shape[1])


def checked_rows(config: ModelConfig) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Rows [tokens, tables, columns] that every rank reads, drawn over whole tables."""
    rng = np.random.default_rng(1)
    for _ in range(NUM_CHECKS):
        shapes = table_shapes(config)
        yield np.stack([rng.integers(0, shape.num_rows, (TOKENS, 24)) for shape in shapes], axis=1)


def digest(parts: Iterator[Codes]) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(np.ascontiguousarray(part).tobytes())
    return hashed.hexdigest()


def read_parts(stager: Stager, config: ModelConfig) -> Iterator[Codes]:
    for rows in checked_rows(config):
        staged = stager.start(rows)
        for table in range(rows.shape[1]):
            found = staged.take(table)
            yield found.codes[found.index]
            yield found.scales[found.index]


def main(arguments: Sequence[str]) -> int:
    root, folder, placement, rank, num_ranks, cache_rows, trouble = arguments
    config = load_model_config(CHECKPOINT)
    options = EngramOptions(
        placement=placement,
        cache_rows=int(cache_rows),
        folder=folder,
        rank=int(rank),
        num_ranks=int(num_ranks),
    )
    source = FileRows(config, trouble)
    try:
        with closing(
            open_tables(table_shapes(config), options, source, root=Path(root), timeout_s=60)
        ) as tables:
            print("ready", digest(read_parts(tables.stager, config)), flush=True)
            while not select.select([sys.stdin], [], [], peers.WATCH_S / 10)[0]:
                digest(read_parts(tables.stager, config))
            print("peer bytes", tables.stager.stats.peer_bytes, flush=True)
    except EngramPeerLost as error:
        print("lost", error, flush=True)
        return LOST
    except ConfigError as error:
        print("refused", error, flush=True)
        return REFUSED
    return STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
