"""Real servers on loopback, each a process of its own, for the tests of the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from api_server import ServerProcess, start_server, wait_ready
from dsserve.cli.default_model import embedded_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The embedded model: of it the fake model takes only configuration and tokenizer."""
    return embedded_model()


@pytest.fixture(scope="session")
def launch(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers of the fake model with extra flags; all are stopped in the end."""
    servers: list[ServerProcess] = []

    def start(*flags: str, fake: dict[str, Any] | None = None) -> ServerProcess:
        log = tmp_path_factory.mktemp("server") / "stderr.log"
        server = start_server(model_path, log, flags, fake)
        servers.append(server)
        wait_ready(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(launch: Callable[..., ServerProcess]) -> ServerProcess:
    """One server that the tests share; they leave it idle."""
    return launch("--max-total-tokens", "65536", fake={"base_us": 500})


@pytest.fixture
def idle_server(server: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server, which must be idle again after the test."""
    yield server
    server.wait_idle()
