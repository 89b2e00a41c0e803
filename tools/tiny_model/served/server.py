"""A real `dsserve launch` on the loopback interface for as long as it is needed."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import httpx
from benchmarks.http_server import running_server as launch

from dsserve.cli.default_model import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@contextlib.contextmanager
def running_server(checkpoint: Path | None, flags: Sequence[str] = ()) -> Iterator[str]:
    """Start a server on a free port, yield its address once it is ready, and stop it.

    Args:
        checkpoint: What to serve; None = what `dsserve launch` finds by itself.
        flags: More flags of `dsserve launch`.

    Raises:
        ServerFailed: If it does not become ready.
    """
    model = () if checkpoint is None else ("--model-path", str(checkpoint.resolve()))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with launch(
        model=NAME,
        flags=("--shutdown-grace-period", "1", *flags, *model),
        environment=threads,
    ) as server:
        yield server.url


def read_counter(url: str, name: str) -> int:
    """The sum of a counter of `/metrics` over its labels; 0 if it was never raised."""
    lines = httpx.get(f"{url}/metrics", timeout=30.0).text.splitlines()
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in lines
        if line.startswith((f"{name}{{", f"{name} "))
    )
