"""The examples against real servers: the embedded model, and the fake model for the tool call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from api_server import ServerProcess, start_server, wait_ready
from dsserve.cli.default_model import embedded_model

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 400


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ...]]:
    """A server of the embedded model and one of the fake model."""
    folder = tmp_path_factory.mktemp("servers")
    model = embedded_model()
    started = (
        start_server(model, folder / "model.log", is_fake=False),
        start_server(model, folder / "fake.log"),
    )
    try:
        for server in started:
            wait_ready(server)
        yield started
    finally:
        for server in started:
            server.stop()


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_check_script_passes_on_the_embedded_model(servers: tuple[ServerProcess, ...]) -> None:
    model, fake = servers
    script = str(EXAMPLES / "openai_client.py")
    output = run(
        sys.executable, script, "--base-url", model.url, "--fake-url", fake.url, "--max-tokens", "8"
    )
    assert "all checks passed" in output
    assert "ok   tool call: parsed from the output" in output


def test_async_client_and_curl_lines_run(servers: tuple[ServerProcess, ...]) -> None:
    _, fake = servers
    run(sys.executable, str(EXAMPLES / "async_client.py"), "--base-url", fake.url)
    assert "data: [DONE]" in run("bash", str(EXAMPLES / "curl.sh"), fake.url)
