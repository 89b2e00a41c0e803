"""Engram placements of a whole server: its tokens, its metrics, and the shared memory it leaves behind (none)."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from api_server import ServerProcess, start_server, wait_ready
from dsserve.config.model import load_model_config
from dsserve.engram.shared import PREFIX, memory_root
from golden_runs import golden, prompt_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
PATIENCE_S = 30
FLAGS = (
    *("--max-running-requests", "4", "--max-total-tokens", "1024"),
    "--disable-decoder-swa-bounded-replay",
)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Servers that a test starts; ended whatever happens."""
    started: list[ServerProcess] = []
    yield started
    for server in started:
        server.stop()


def start(servers: list[ServerProcess], log: Path, *flags: str) -> ServerProcess:
    server = start_server(CHECKPOINT, log, (*FLAGS, *flags), is_fake=False)
    servers.append(server)
    return server


def folders_of(process_ids: set[int]) -> list[Path]:
    """Folders of shared memory that processes have mapped files of."""
    found = set()
    for process_id in process_ids:
        maps = Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8")
        found |= {Path(path).parent for path in re.findall(rf"{memory_root()}/{PREFIX}\S*", maps)}
    return sorted(found)


def metric(server: ServerProcess, name: str) -> dict[str, float]:
    """Values of a series by its own labels."""
    values = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith((f"dsserve_{name}{{", f"dsserve_{name} ")):
            labels, value = line.rsplit(" ", 1)
            own = re.findall(r'(\w+)="([^"]*)"', labels)
            key = ",".join(v for k, v in own if k not in ("model_name", "dp_rank", "role"))
            values[key] = float(value)
    return values


def wait_rows(server: ServerProcess, placement: str, least: int) -> float:
    """The counter of rows, once a heartbeat has brought so many."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        rows = metric(server, "engram_rows_total")
        assert set(rows) <= {placement}
        if rows.get(placement, 0) >= least:
            return rows[placement]
        assert time.monotonic() < deadline_s, rows
        time.sleep(0.1)


def complete(server: ServerProcess, prompt: str, num_tokens: int) -> list[int]:
    response = server.post(
        "/v1/completions",
        {
            "model": CHECKPOINT.name,
            "prompt": prompt_ids(CHECKPOINT, prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "algorithm"), [("sharded", "DSPARK"), ("host", "none")])
def test_a_server_with_shared_tables_answers_as_ever_counts_its_rows_and_cleans_up(
    servers: list[ServerProcess], tmp_path: Path, placement: str, algorithm: str
) -> None:
    server = start(
        servers,
        tmp_path / "log",
        *("--engram-placement", placement, "--engram-cache-size", "500"),
        *("--speculative-algorithm", algorithm),
    )
    wait_ready(server)
    [folder] = folders_of({server.engine_pid()})
    assert folder.stat().st_mode & 0o777 == 0o700

    expected = golden(CHECKPOINT, "released")["len64.greedy.tokens"].tolist()
    assert complete(server, "len64", len(expected)) == expected
    server.wait_idle()
    # All columns of both tables for each prompt token and each token but the last; steps in flight and refused drafts
    # come on top.
    config = load_model_config(CHECKPOINT)
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    least = (64 + len(expected) - 1) * len(config.engram_layer_ids) * columns
    rows = wait_rows(server, placement, least)
    cached = metric(server, "engram_cache_rows_total")
    assert set(cached) == {"hit", "miss"}
    assert 0 < cached["miss"] < cached["hit"] + cached["miss"] <= rows
    assert metric(server, "engram_host_read_seconds_count")[""] > 0
    assert metric(server, "engram_host_read_seconds_sum")[""] > 0
    assert metric(server, "engram_peer_bytes_total") == {"": 0}

    # The engine dies; the server notices, ends, and removes what the engine cannot.
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.wait_exit() != 0
    assert not folder.exists()


@pytest.mark.slow
def test_a_server_that_ends_removes_its_shared_memory(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    server = start(servers, tmp_path / "log", "--engram-placement", "host")
    wait_ready(server)
    [folder] = folders_of({server.engine_pid()})
    server.stop()
    assert not folder.exists()


@pytest.mark.slow
def test_the_engine_removes_the_shared_memory_when_the_server_is_killed(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    server = start(servers, tmp_path / "log", "--engram-placement", "host")
    wait_ready(server)
    [folder] = folders_of({server.engine_pid()})
    engine = Path(f"/proc/{server.engine_pid()}")
    server.process.kill()
    server.process.wait()
    while engine.exists():  # its watchdog ends it
        os.sched_yield()
    assert not folder.exists()


@pytest.mark.slow
def test_tables_that_are_not_allowed_their_memory_end_the_start_with_the_bytes_they_need(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    server = start(
        servers,
        tmp_path / "log",
        *("--engram-placement", "host", "--engram-memory-limit", "64KiB"),
    )
    assert server.wait_exit() == 2
    log = server.log.read_text()
    assert re.search(r"Engram tables need \d+ bytes .*--engram-memory-limit allows 65536", log)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--engram-cache-size", "100"), "--engram-cache-size 100"),
        (("--engram-placement", "elsewhere"), "--engram-placement"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    servers: list[ServerProcess], tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    server = start(servers, tmp_path / "log", *flags)
    assert server.wait_exit() == 2
    assert named in server.log.read_text()
