"""Greedy streams over HTTP: when their pieces arrive, and the figure of their rate."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from benchmarks.record import Figure

if TYPE_CHECKING:
    from benchmarks.http_server import Server

REQUEST_TIMEOUT_S = 300.0
PROMPT_TOKENS = 32
NEW_TOKENS = 128
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Stream:
    """Times of one stream.

    Attributes:
        sent_s: When the request was sent.
        arrivals_s: When each piece arrived.
        num_tokens: Tokens in all.
        cached_tokens: Of the prompt, how many were not computed.
    """

    sent_s: float
    arrivals_s: list[float]
    num_tokens: int
    cached_tokens: int


def decode_figures(
    server: Server, *, name: str, bars: dict[int, float], vocab_size: int
) -> list[Figure]:
    """Tokens a second after the first one, for as many streams as `bars` has entries.

    Args:
        server: Where to ask.
        name: Beginning of the figures' names.
        bars: Number of streams -> tokens a second to reach.
        vocab_size: Prompts are random ids below it.
    """
    return asyncio.run(_decode(server, name, bars, vocab_size))


async def _decode(
    server: Server, name: str, bars: dict[int, float], vocab_size: int
) -> list[Figure]:
    figures = []
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_TIMEOUT_S) as client:

        async def run(num_streams: int, seed: int) -> list[Stream]:
            shape = (num_streams, PROMPT_TOKENS)
            prompts = np.random.default_rng(seed).integers(3, vocab_size, size=shape)
            return await asyncio.gather(
                *(stream(client, server.model, prompt.tolist(), NEW_TOKENS) for prompt in prompts)
            )

        await run(max(bars), 0)
        for num_streams, bar in bars.items():
            rounds = [
                await run(num_streams, 100 * num_streams + number)
                for number in range(1, ROUNDS + 1)
            ]
            figures.append(_rate(f"{name}.decode_{num_streams}_streams", server.model, rounds, bar))
    return figures


async def stream(
    client: httpx.AsyncClient, model: str, prompt: list[int], num_tokens: int
) -> Stream:
    """Decode so many tokens behind a prompt of ids; end tokens are ignored.

    Raises:
        RuntimeError: If the server refuses, breaks off, or gives another number of tokens.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals_s: list[float] = []
    received = cached = 0
    sent_s = time.perf_counter()
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
                received = event["usage"]["completion_tokens"]
                details = event["usage"].get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens", 0)
    if received != num_tokens:
        raise RuntimeError(f"a stream had {received} tokens, expected {num_tokens}")
    return Stream(sent_s, arrivals_s, received, cached)


def _rate(name: str, model: str, rounds: list[list[Stream]], bar: float) -> Figure:
    """Rate over all rounds: tokens after each stream's first, over the time in which they came."""
    tokens = sum(each.num_tokens - 1 for streams in rounds for each in streams)
    seconds = sum(
        max(each.arrivals_s[-1] for each in streams) - min(each.arrivals_s[0] for each in streams)
        for streams in rounds
    )
    gaps_ms = np.concatenate(
        [np.diff(each.arrivals_s) * 1e3 for streams in rounds for each in streams]
    )
    settings = {
        "checkpoint": model,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "rounds": ROUNDS,
        "itl_ms_p50": round(float(np.percentile(gaps_ms, 50)), 3),
        "itl_ms_p99": round(float(np.percentile(gaps_ms, 99)), 3),
    }
    return Figure(
        name=name,
        unit="tokens/s",
        value=tokens / seconds,
        p50=None,
        p99=None,
        count=tokens,
        bar=bar,
        higher_is_better=True,
        settings=settings,
    )
