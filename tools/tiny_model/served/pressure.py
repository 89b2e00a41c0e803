"""Asks questions while a second request takes the last pages, so that the asking request is retracted.

The pool just holds the largest request. Next to each question runs a filler whose prompt leaves `_SLACK` tokens free:
more than admission keeps in reserve, fewer than both decode. The question has decoded less, so it is the one that gives its
pages back; the filler is cut off after `_FILLER_TOKENS`, and the question goes on with what the prefix cache kept.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from tools.tiny_model.served.client import RequestFailed, ask, run_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tools.tiny_model.served.cases import Reply

PAGE_SIZE = 4
_SLACK = 44
_FILLER_TOKENS = 36
_LEAST_FILLER = 8
_HEADROOM = 8


@dataclass(frozen=True, slots=True)
class Pressed:
    """A request and the length of its prompt in tokens."""

    body: dict[str, Any]
    prompt_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens it may take in all."""
        most: int = self.body["max_tokens"]
        return self.prompt_len + most


def pool_tokens(requests: Sequence[Pressed]) -> int:
    """Tokens of a pool that holds each of the requests, but hardly anything else."""
    return _whole_pages(max(request.num_tokens for request in requests) + _HEADROOM)


def server_flags(requests: Sequence[Pressed]) -> list[str]:
    """Flags of a server in which `ask_pressed` works.

    Admission must not be cautious from the start, and both requests must take a token a step: pages are kept ahead of drafts.
    """
    return [
        "--page-size", str(PAGE_SIZE), "--max-total-tokens", str(pool_tokens(requests)),
        "--schedule-conservativeness", "0.01", "--speculative-algorithm", "none",
    ]  # fmt: skip


def ask_pressed(
    url: str, requests: Sequence[Pressed], tell: Callable[[int], None] = lambda _: None
) -> list[Reply]:
    """Send the requests one after the other, each with its filler."""
    return run_requests(_ask_pressed(url, requests, tell))


async def _ask_pressed(
    url: str, requests: Sequence[Pressed], tell: Callable[[int], None]
) -> list[Reply]:
    pool = pool_tokens(requests)
    replies = []
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        for number, request in enumerate(requests, 1):
            taken = _whole_pages(request.prompt_len + 1)
            length = max(_LEAST_FILLER, pool - taken - _SLACK)
            async with asyncio.TaskGroup() as group:
                group.create_task(_fill(client, length, pool - length - 2 * PAGE_SIZE))
                reply = group.create_task(ask(client, request.body))
            replies.append(reply.result())
            tell(number)
    return replies


async def _fill(client: httpx.AsyncClient, length: int, limit: int) -> None:
    """Decode for a while behind a prompt that nothing else has, then leave."""
    body = {
        "prompt": [5 + (7 * i) % 200 for i in range(length)],
        "min_tokens": limit,
        "max_tokens": limit,
        "temperature": 0,
        "stream": True,
    }
    received = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RequestFailed(f"filler: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            received += line.startswith("data:")
            if received > _FILLER_TOKENS:
                return


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE) * PAGE_SIZE
