"""How fast is the embedded model on this machine: decoding, a 1K prompt, the start, and the memory of the server?

The default flags of `dsserve launch`. Greedy; prompts are random ids, so no prefix is found again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from benchmarks.http_server import Server, running_server
from benchmarks.http_streams import REQUEST_TIMEOUT_S, decode_figures, stream
from benchmarks.record import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "dsserve-tiny"
VOCAB_SIZE = 2000
#: Streams -> tokens per second to reach.
BARS = {1: 50.0, 8: 150.0}
PROMPT_TOKENS = 1024
PROMPTS = 9
STARTS = 3
READY_BAR_S = 10.0


def measure() -> list[Figure]:
    """Start the server several times; decode, prefill and weigh the last one."""
    ready_s = []
    for _ in range(STARTS - 1):
        with running_server(model=NAME) as server:
            ready_s.append(server.ready_s)
    with running_server(model=NAME) as server:
        ready_s.append(server.ready_s)
        figures = decode_figures(server, name="embedded", bars=BARS, vocab_size=VOCAB_SIZE)
        first_token_ms = asyncio.run(_first_token_ms(server))
        resident_mib = server.resident_bytes() / 2**20
    settings = {"checkpoint": NAME}
    return [
        *figures,
        _spread(
            "embedded.first_token_1k", "ms", first_token_ms, None,
            settings | {"prompt_tokens": PROMPT_TOKENS},
        ),
        _spread("embedded.start_to_ready", "s", ready_s, READY_BAR_S, settings),
        Figure(
            "embedded.resident_memory", "MiB", resident_mib, None, None, 1,
            settings=settings | {"processes": "API and engine, after the other measurements"},
        ),
    ]  # fmt: skip


async def _first_token_ms(server: Server) -> list[float]:
    """Time to the first token of prompts alone on the server; the first one only warms up."""
    shape = (PROMPTS + 1, PROMPT_TOKENS)
    prompts = np.random.default_rng(7).integers(3, VOCAB_SIZE, size=shape)
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_TIMEOUT_S) as client:
        streams = [await stream(client, server.model, prompt.tolist(), 2) for prompt in prompts]
    return [1e3 * (each.arrivals_s[0] - each.sent_s) for each in streams[1:]]


def _spread(
    name: str, unit: str, samples: Sequence[float], bar: float | None, settings: dict[str, Any]
) -> Figure:
    p50, p99 = (float(value) for value in np.percentile(samples, [50, 99]))
    return Figure(name, unit, p50, p50, p99, len(samples), bar=bar, settings=settings)
