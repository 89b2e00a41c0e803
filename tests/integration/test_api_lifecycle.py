"""How a server starts, drains and dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api_server import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from api_server import ServerProcess

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [10, 11, 12], "max_tokens": 2000, "ignore_eos": True}
SLOW = {"base_us": 2000}


class Answer(threading.Thread):
    """A request running in the background."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        super().__init__()
        self._server = server
        self._body = body
        self.response: httpx.Response | None = None
        self.error: httpx.HTTPError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.response = self._server.post(COMPLETIONS, self._body)
        except httpx.HTTPError as error:
            self.error = error

    def result(self) -> httpx.Response:
        self.join(60)
        assert not self.is_alive(), "the request hangs"
        assert self.response is not None, self.error
        return self.response

    def ended_well(self) -> bool:
        """Whether a stream came to its end; false for an error event and a cut connection."""
        self.join(60)
        assert not self.is_alive(), "the request hangs"
        return self.response is not None and "[DONE]" in self.response.text


def last_event(response: httpx.Response) -> Any:
    return json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))


def test_ready_line_tells_url_and_a_curl_line_that_works(server: ServerProcess) -> None:
    ready, hint = server.ready_lines
    assert server.url in ready
    assert hint.startswith("Try: curl ")
    done = subprocess.run(
        hint.removeprefix("Try: ") + " -sS",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["choices"]


def test_killed_engine_gives_503_and_exit_code_3(launch: Callable[..., ServerProcess]) -> None:
    server = launch(fake=SLOW)
    whole = Answer(server, LONG)
    streamed = Answer(server, LONG | {"stream": True})
    server.wait_running(2)
    os.kill(server.engine_pid(), signal.SIGKILL)
    response = whole.result()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_lost"
    assert "retry-after" in response.headers
    response = streamed.result()
    assert response.status_code == 200
    assert last_event(response)["error"]["code"] == "engine_lost"
    assert "[DONE]" not in response.text
    assert server.wait_exit() == 3


def test_sigterm_lets_running_requests_finish_and_exits_0(
    launch: Callable[..., ServerProcess],
) -> None:
    server = launch(fake=SLOW)
    body = LONG | {"max_tokens": 300}
    whole = Answer(server, body)
    streamed = Answer(server, body | {"stream": True})
    server.wait_running(2)
    server.signal(signal.SIGTERM)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while (ready := client.get("/ready")).status_code == 200:
            pass  # the signal is on its way
        assert ready.status_code == 503
        refused = client.post(COMPLETIONS, json={"prompt": [10]})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert "retry-after" in refused.headers
    assert whole.result().json()["usage"]["completion_tokens"] == 300
    assert streamed.result().text.endswith("data: [DONE]\n\n")
    assert server.wait_exit() == 0


def test_after_the_grace_period_requests_end_with_503(
    launch: Callable[..., ServerProcess],
) -> None:
    server = launch("--shutdown-grace-period", "0.2", fake={"base_us": 20000})
    whole = Answer(server, LONG)
    streamed = Answer(server, LONG | {"stream": True})
    server.wait_running(2)
    server.signal(signal.SIGTERM)
    response = whole.result()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"
    assert last_event(streamed.result())["error"]["code"] == "shutting_down"
    assert server.wait_exit() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_stops_at_once(
    launch: Callable[..., ServerProcess], second: signal.Signals
) -> None:
    server = launch(fake={"base_us": 20000})
    streamed = Answer(server, LONG | {"stream": True})
    server.wait_running()
    server.signal(signal.SIGTERM)
    while server.get("/ready").status_code == 200:
        pass
    server.signal(second)
    assert server.wait_exit() == 128 + second
    assert not streamed.ended_well()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_idle_server_whose_terminal_ends_it_exits_0_and_takes_its_engine_along(
    launch: Callable[..., ServerProcess], number: signal.Signals
) -> None:
    server = launch()
    engine = server.engine_pid()
    os.kill(engine, number)  # a terminal tells the whole process group
    server.signal(number)
    assert server.wait_exit() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_port_in_use_is_one_line_and_exit_code_2(server: ServerProcess, model_path: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "dsserve.cli.main", "launch", "--port", port]
    command += ["--model-path", str(model_path), "--load-format", "fake"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "decided for" not in line]
    assert f"--port {port}: already in use" in line
    assert server.get("/health").status_code == 200


def test_broken_checkpoint_ends_with_exit_code_2_and_names_the_file(
    model_path: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_path, broken)
    (weights, *_) = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    command = [sys.executable, "-m", "dsserve.cli.main", "launch", "--port", str(free_port())]
    command += ["--model-path", str(broken)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert weights.name in done.stderr
    assert "Traceback" not in done.stderr
