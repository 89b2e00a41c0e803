"""A real `dsserve launch` on the loopback interface for as long as it is needed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.2


class ServerFailed(Exception):  # noqa: N818 - reads as what happened
    """The server did not start, or is gone; the message holds the end of its log."""


@contextlib.contextmanager
def running_server(checkpoint: Path | None, flags: Sequence[str] = ()) -> Iterator[str]:
    """Start a server on a free port, yield its address once it is ready, and stop it.

    Args:
        checkpoint: What to serve; None = what `dsserve launch` finds by itself.
        flags: More flags of `dsserve launch`.

    Raises:
        ServerFailed: If it does not become ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dsserve", "launch", "--port", str(port)]
    command += ["--shutdown-grace-period", "1", *flags]
    if checkpoint is not None:
        command += ["--model-path", str(checkpoint)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _wait_ready(url, process):
                log.seek(0)
                raise ServerFailed(f"the server did not become ready: {log.read()[-2000:]}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def read_counter(url: str, name: str) -> int:
    """The sum of a counter of `/metrics` over its labels; 0 if it was never raised."""
    lines = httpx.get(f"{url}/metrics", timeout=30.0).text.splitlines()
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in lines
        if line.startswith((f"{name}{{", f"{name} "))
    )


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == httpx.codes.OK:
                return True
        time.sleep(_POLL_S)
    return False
