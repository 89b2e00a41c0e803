"""A real server as a process of its own, and what tests want to know of it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0


@dataclass
class ServerProcess:
    """A running `dsserve launch`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    ready_lines: list[str] = field(default_factory=list)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        options.setdefault("timeout", 60.0)
        return httpx.request(method, self.url + path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.request("POST", path, **options)

    def state(self) -> dict[str, Any]:
        """The scheduler's state, after its invariant check."""
        info = self.get("/get_server_info").json()
        assert info["state_error"] is None, info["state_error"]
        state: dict[str, Any] = info["state"]
        return state

    def wait_idle(self) -> dict[str, Any]:
        """Wait, for a bounded time, until nothing runs and no pool unit is in use."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            state = self.state()
            if is_idle(state):
                return state
            assert time.monotonic() < deadline_s, f"not idle: {state}"

    def wait_running(self, count: int = 1) -> None:
        """Wait until so many requests are held."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while num_held(self.state()) < count:
            assert time.monotonic() < deadline_s, "the requests did not start"

    def engine_pid(self) -> int:
        """Process id of the engine process."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                if b"dsserve.engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        raise AssertionError("the server has no engine process")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_exit(self) -> int:
        return self.process.wait(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """End the server whatever state it is in; the engine process ends with it."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def is_idle(state: dict[str, Any]) -> bool:
    """Whether the server holds nothing but its prefix cache."""
    return num_held(state) == 0 and all(
        pool["locked"] == pool["private"] == pool["quarantined"] == 0
        and pool["free"] + pool["evictable"] == pool["capacity"]
        for pool in state["pools"]
    )


def num_held(state: dict[str, Any]) -> int:
    stats = state["stats"]
    return int(stats["num_running"] + stats["num_waiting"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_server(
    model_path: Path,
    log: Path,
    flags: tuple[str, ...] = (),
    fake: dict[str, Any] | None = None,
    *,
    is_fake: bool = True,
) -> ServerProcess:
    """Start `dsserve launch`, with the fake model unless told otherwise; `wait_ready` must follow.

    Args:
        model_path: A checkpoint; the fake model takes only configuration and tokenizer of it.
        log: File for the log of both processes.
        flags: More launch flags.
        fake: Settings of the fake model.
        is_fake: False: serve the checkpoint itself.
    """
    port = free_port()
    command = [sys.executable, "-m", "dsserve.cli.main", "launch"]
    command += ["--model-path", str(model_path), "--port", str(port), *flags]
    if is_fake:
        command += ["--load-format", "fake"]
        command += ["--json-model-override-args", json.dumps({"fake": fake or {}})]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return ServerProcess(process, f"http://127.0.0.1:{port}", log)


def wait_ready(server: ServerProcess) -> None:
    """Read stdout until the ready line and the line to try are there."""
    stdout = server.process.stdout
    assert stdout is not None
    deadline_s = time.monotonic() + START_TIMEOUT_S
    text = b""
    while text.count(b"\n") < 2:
        left_s = max(0.0, deadline_s - time.monotonic())
        readable, _, _ = select.select([stdout], [], [], left_s)
        data = os.read(stdout.fileno(), 4096) if readable else b""
        if not data:
            server.stop()
            pytest.fail(f"the server did not start:\n{server.log.read_text()[-4000:]}")
        text += data
    server.ready_lines = text.decode().splitlines()
