"""Engram tables shared by several processes: the same rows, clean errors when one dies, nothing left behind."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import engram_rank
from dsserve.config.model import load_model_config
from dsserve.engram import peers
from dsserve.engram.shared import folder_name, sweep
from dsserve.engram.table import table_shapes
from dsserve.models.deepseek_v4.safetensors_file import SafetensorsFile
from engram_rank import LOST, REFUSED, STOPPED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = folder_name("ranks")
#: Far more than the 5 s that the errors may take: a hang fails the test, a slow machine does not.
PATIENCE_S = 60


class Rank:
    """A child process."""

    def __init__(self, root: Path, placement: str, rank: int, num_ranks: int, trouble: str) -> None:
        cache_rows = 100 * rank
        arguments = (root, FOLDER, placement, rank, num_ranks, cache_rows, trouble)
        self.process = subprocess.Popen(
            [sys.executable, engram_rank.__file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, text: str = "") -> tuple[int, str]:
        """Close its input (which tells it to stop) or wait for it; exit code and last line."""
        output, _ = self.process.communicate(text or None, timeout=PATIENCE_S)
        lines = output.strip().splitlines()
        return self.process.returncode, lines[-1] if lines else ""

    def wait(self) -> tuple[int, str]:
        """Wait for it to end by itself."""
        code = self.process.wait(timeout=PATIENCE_S)
        assert self.process.stdout is not None
        lines = self.process.stdout.read().strip().splitlines()
        return code, lines[-1] if lines else ""


@contextmanager
def running(
    root: Path, placement: str, num_ranks: int, *, trouble: dict[int, str] | None = None
) -> Iterator[list[Rank]]:
    troubles = trouble or {}
    ranks = [
        Rank(root, placement, rank, num_ranks, troubles.get(rank, "none"))
        for rank in range(num_ranks)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.communicate()


def expected_digest() -> str:
    """Of the same rows, read from the checkpoint's file."""
    config = load_model_config(engram_rank.CHECKPOINT)
    shapes = table_shapes(config)
    arrays = []
    with SafetensorsFile(engram_rank.CHECKPOINT / "model.safetensors") as file:
        data = file.path.read_bytes()
        for layer, shape in zip(config.engram_layer_ids, shapes, strict=True):
            pair = []
            for leaf, width in (("weight", shape.width), ("scale", shape.scale_width)):
                entry = file.entries[f"layers.{layer}.engram.embed.{leaf}"]
                pair.append(
                    engram_rank.np.frombuffer(
                        data, "u1", count=entry.num_bytes, offset=entry.start
                    ).reshape(-1, width)
                )
            arrays.append(pair)

    def parts() -> Iterator[object]:
        for rows in engram_rank.checked_rows(config):
            for table, pair in enumerate(arrays):
                yield pair[0][rows[:, table]]
                yield pair[1][rows[:, table]]

    return engram_rank.digest(parts())


@pytest.mark.parametrize(
    ("placement", "num_ranks"),
    [
        ("host", 2),
        ("sharded", 3),
        pytest.param("host", 4, marks=pytest.mark.slow),
        pytest.param("sharded", 2, marks=pytest.mark.slow),
    ],
)
def test_all_processes_read_the_rows_of_the_checkpoint(
    tmp_path: Path, placement: str, num_ranks: int
) -> None:
    with running(tmp_path, placement, num_ranks) as ranks:
        assert {rank.line() for rank in ranks} == {f"ready {expected_digest()}"}
        ends = [rank.end() for rank in ranks]
    assert [code for code, _ in ends] == [STOPPED] * num_ranks
    peer_bytes = [int(line.split()[-1]) for _, line in ends]
    assert all(count > 0 for count in peer_bytes) == (placement == "sharded")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("placement", "num_ranks", "victim"),
    [
        ("sharded", 4, 2),
        pytest.param("host", 2, 0, marks=pytest.mark.slow),
        pytest.param("host", 3, 1, marks=pytest.mark.slow),
        pytest.param("sharded", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_the_others_end_with_a_clean_error_when_one_is_killed(
    tmp_path: Path, placement: str, num_ranks: int, victim: int
) -> None:
    # Each rank looks at the others at this interval, and every look-up after it raises.
    assert peers.WATCH_S <= 1
    with running(tmp_path, placement, num_ranks) as ranks:
        assert all(rank.line().startswith("ready") for rank in ranks)
        ranks[victim].process.kill()
        others = [rank for index, rank in enumerate(ranks) if index != victim]
        for rank in others:
            code, line = rank.wait()
            assert code == LOST
            # Or another rank, which gave up because of the same death.
            assert re.match(r"lost the process of Engram rank \d is gone", line)
    # The killed process could remove nothing; if it was the one that made the folder, the next server sweeps.
    assert sweep(root=tmp_path) == ([FOLDER] if victim == 0 else [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "victim"), [("sharded", 1), ("host", 0)])
def test_a_death_while_loading_ends_the_wait_of_the_others(
    tmp_path: Path, placement: str, victim: int
) -> None:
    with running(tmp_path, placement, 3, trouble={victim: "die"}) as ranks:
        for index, rank in enumerate(ranks):
            if index != victim:
                code, line = rank.wait()
                assert code == LOST
                assert "died while it loaded" in line or "has ended" in line


@pytest.mark.slow
def test_a_part_that_cannot_be_loaded_is_told_to_the_others(tmp_path: Path) -> None:
    with running(tmp_path, "sharded", 2, trouble={1: "fail"}) as ranks:
        assert ranks[1].wait() == (REFUSED, "refused the disk is on fire")
        code, line = ranks[0].wait()
        assert code == REFUSED
        assert line == "refused Engram rank 1 could not load its part: the disk is on fire"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_of_servers_that_were_killed_whole_is_swept_by_the_next(tmp_path: Path) -> None:
    with running(tmp_path, "sharded", 2) as ranks:
        assert all(rank.line().startswith("ready") for rank in ranks)
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait()
    left = list(itertools.chain.from_iterable(path.iterdir() for path in tmp_path.iterdir()))
    assert any(path.name.startswith("table.") for path in left)
    assert sweep(root=tmp_path) == [FOLDER]
    assert list(tmp_path.iterdir()) == []
