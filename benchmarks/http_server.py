"""A `dsserve launch` process for a measurement: its address, how long it took to be ready, and its memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.record import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


class ServerFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """The server did not start, or is gone; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        url: Its address.
        model: Name of the model in the API.
        pid: The API process.
        ready_s: Seconds from the start of the command until it answered that it is ready.
    """

    url: str
    model: str
    pid: int
    ready_s: float

    def resident_bytes(self) -> int:
        """Memory of the API process and of all it started; what they share counts once for each."""
        return sum(_resident_bytes(pid) for pid in _family(self.pid))


@contextlib.contextmanager
def running_server(
    *, model: str, flags: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run `dsserve launch` on a free port; yields the server once it is ready.

    Args:
        model: Name of the model in the API.
        flags: More flags; without `--model-path` the embedded model is served.
        environment: Variables on top of this process's.

    Raises:
        ServerFailed: If it does not become ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dsserve", "launch", "--port", str(port)]
    command += ["--served-model-name", model, *flags]
    with tempfile.TemporaryFile("w+") as log:
        started_s = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _wait_ready(url, process):
                log.seek(0)
                raise ServerFailed(f"the server did not become ready: {log.read()[-2000:]}")
            yield Server(url, model, process.pid, time.monotonic() - started_s)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == httpx.codes.OK:
                return True
        time.sleep(_POLL_S)
    return False


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(each) for each in children.read_text().split()]
    return found


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
