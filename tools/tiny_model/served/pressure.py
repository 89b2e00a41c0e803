"""Asks questions each of which is retracted once: a more urgent request takes its pages.

The pool just holds the largest question. Next to each question comes a filler of higher priority, sent when the first
token of the answer arrives, whose prompt takes one page more than the question leaves. The question gives its pages back, the
filler ends with its first token, and the question goes on with what the prefix cache kept.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from tools.tiny_model.served.client import RequestFailed, ask_streamed, run_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tools.tiny_model.served.cases import Reply

PAGE_SIZE = 4
_LEAST_FILLER = 8
_HEADROOM = 8
_URGENT = 1000


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

    A token a step leaves the filler time to come before the answer ends.
    """
    return [
        "--page-size", str(PAGE_SIZE), "--max-total-tokens", str(pool_tokens(requests)),
        "--enable-priority-scheduling", "--speculative-algorithm", "none",
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
            length = max(_LEAST_FILLER, pool - _whole_pages(request.prompt_len) + PAGE_SIZE)
            has_begun = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(_fill(client, length, has_begun))
                reply = group.create_task(ask_streamed(client, request.body, has_begun))
            replies.append(reply.result())
            tell(number)
    return replies


async def _fill(client: httpx.AsyncClient, length: int, start: asyncio.Event) -> None:
    """Send a prompt that nothing else has, for one token."""
    body = {
        "prompt": [5 + (7 * i) % 200 for i in range(length)],
        "max_tokens": 1,
        "temperature": 0,
        "priority": _URGENT,
    }
    await start.wait()
    response = await client.post("/v1/completions", json=body)
    if response.status_code != httpx.codes.OK:
        raise RequestFailed(f"filler: {response.text[:500]}")


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE) * PAGE_SIZE
