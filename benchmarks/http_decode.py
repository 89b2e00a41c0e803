"""How many tokens a second does the HTTP server decode, for one stream and for eight?

Checkpoint: golden A (12 layers, random weights), on the CPU. Greedy, end tokens ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import numpy as np

from benchmarks.record import ROOT, Figure

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKPOINT = ROOT / "tests" / "golden" / "data" / "v41-tiny-a"
PROMPT_TOKENS = 32
NEW_TOKENS = 128
ROUNDS = 3
READY_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 300.0
#: Streams -> tokens per second to reach.
BARS = {1: 30.0, 8: 100.0}


@dataclass(frozen=True, slots=True)
class _Stream:
    """Times at which pieces of one stream arrived, and how many tokens it had in all."""

    arrivals_s: list[float]
    num_tokens: int


def measure() -> list[Figure]:
    """Start a server, warm it up, and decode; the figure is tokens per second after the first token."""
    with _server() as url:
        return asyncio.run(_measure(url))


async def _measure(url: str) -> list[Figure]:
    figures = []
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        await _round(client, num_streams=max(BARS), seed=0)
        for num_streams, bar in BARS.items():
            rounds = [
                await _round(client, num_streams=num_streams, seed=100 * num_streams + number)
                for number in range(1, ROUNDS + 1)
            ]
            figures.append(_figure(rounds, num_streams=num_streams, bar=bar))
    return figures


async def _round(client: httpx.AsyncClient, *, num_streams: int, seed: int) -> list[_Stream]:
    prompts = np.random.default_rng(seed).integers(3, 500, size=(num_streams, PROMPT_TOKENS))
    return await asyncio.gather(*(_stream(client, prompt.tolist()) for prompt in prompts))


async def _stream(client: httpx.AsyncClient, prompt: list[int]) -> _Stream:
    body = {
        "model": CHECKPOINT.name,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals_s: list[float] = []
    num_tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event['error']}")
            if event.get("choices"):
                arrivals_s.append(time.perf_counter())
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    if num_tokens != NEW_TOKENS:
        raise RuntimeError(f"a stream had {num_tokens} tokens, expected {NEW_TOKENS}")
    return _Stream(arrivals_s, num_tokens)


def _figure(rounds: list[list[_Stream]], *, num_streams: int, bar: float) -> Figure:
    """Rate over all rounds: tokens after each stream's first, over the time in which they came."""
    tokens = sum(stream.num_tokens - 1 for streams in rounds for stream in streams)
    seconds = sum(
        max(stream.arrivals_s[-1] for stream in streams)
        - min(stream.arrivals_s[0] for stream in streams)
        for streams in rounds
    )
    gaps_ms = np.concatenate(
        [np.diff(stream.arrivals_s) * 1e3 for streams in rounds for stream in streams]
    )
    settings = {
        "checkpoint": CHECKPOINT.name,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "rounds": ROUNDS,
        "itl_ms_p50": round(float(np.percentile(gaps_ms, 50)), 3),
        "itl_ms_p99": round(float(np.percentile(gaps_ms, 99)), 3),
    }
    return Figure(
        name=f"http.decode_{num_streams}_streams",
        unit="tokens/s",
        value=tokens / seconds,
        p50=None,
        p99=None,
        count=tokens,
        bar=bar,
        higher_is_better=True,
        settings=settings,
    )


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """Run `dsserve launch` on a free port; yields its address once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dsserve", "launch", "--model-path", str(CHECKPOINT)]
    command += ["--served-model-name", CHECKPOINT.name, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _wait_ready(url, process):
                log.seek(0)
                raise RuntimeError(f"the server did not become ready: {log.read()[-1500:]}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == httpx.codes.OK:
                return True
        time.sleep(0.2)
    return False
