"""What does bounded replay save? Time to the first token of a 2K prompt: late layers on all rows or on the last window, cold or behind a hit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import numpy as np

from benchmarks.http_server import Server, running_server
from benchmarks.http_streams import REQUEST_TIMEOUT_S, Stream, stream
from benchmarks.record import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "dsserve-tiny"
VOCAB_SIZE = 2000
PROMPT_TOKENS = 2048
PROMPTS = 6
NEW_TOKENS = 2
SETUPS = {
    "decoder_replay": (),
    "no_decoder_replay": ("--disable-decoder-swa-bounded-replay",),
}


def measure() -> list[Figure]:
    """Prompts alone on the server, each sent twice; the first prompt only warms up."""
    figures = []
    for setup, flags in SETUPS.items():
        with running_server(model=NAME, flags=flags) as server:
            rounds = asyncio.run(_send_twice(server))[1:]
        cold, hits = zip(*rounds, strict=True)
        if any(each.cached_tokens for each in cold) or not all(each.cached_tokens for each in hits):
            raise RuntimeError(f"{setup}: not the hits that were to be measured")
        settings = {"checkpoint": NAME, "flags": " ".join(flags), "prompt_tokens": PROMPT_TOKENS}
        figures.append(_figure(f"replay.{setup}.first_token_2k_cold", cold, settings))
        cached = {"cached_tokens": hits[0].cached_tokens}
        figures.append(_figure(f"replay.{setup}.first_token_2k_hit", hits, settings | cached))
    return figures


async def _send_twice(server: Server) -> list[tuple[Stream, Stream]]:
    shape = (PROMPTS + 1, PROMPT_TOKENS)
    prompts = np.random.default_rng(11).integers(3, VOCAB_SIZE, size=shape).tolist()
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_TIMEOUT_S) as client:
        return [
            (
                await stream(client, server.model, prompt, NEW_TOKENS),
                await stream(client, server.model, prompt, NEW_TOKENS),
            )
            for prompt in prompts
        ]


def _figure(name: str, streams: Sequence[Stream], settings: dict[str, object]) -> Figure:
    samples = [1e3 * (each.arrivals_s[0] - each.sent_s) for each in streams]
    p50, p99 = (float(value) for value in np.percentile(samples, [50, 99]))
    return Figure(name, "ms", p50, p50, p99, len(samples), settings=settings)
