"""Sends chat requests, several at a time, and reads the replies."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
from tools.tiny_model.served.cases import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

_CONNECT_TIMEOUT_S = 10.0


class RequestFailed(Exception):  # noqa: N818 - reads as what happened
    """The server refused a request or broke off."""


def ask_all(
    url: str,
    bodies: Sequence[Sequence[dict[str, Any]]],
    *,
    in_flight: int,
    tell: Callable[[int], None] = lambda _: None,
) -> list[Reply]:
    """Send chains of chat requests; those of one chain one after the other.

    Args:
        url: Address of the server.
        bodies: Chains; a request of a chain is sent when the one before it is answered.
        in_flight: Chains under way at a time.
        tell: Called with the number of chains that are done.

    Returns:
        The reply to the last request of every chain.

    Raises:
        RequestFailed: If any request fails.
    """
    return run_requests(_ask_all(url, bodies, in_flight, tell))


def run_requests(requests: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
    """Run tasks to their end; the first refusal ends all of them.

    Raises:
        RequestFailed: If any request fails.
    """
    try:
        return asyncio.run(requests)
    except ExceptionGroup as group:
        refused, other = group.split(RequestFailed)
        if other is not None or refused is None:
            raise
        raise RequestFailed(str(_first_of(refused))) from group


def _first_of(error: BaseException) -> BaseException:
    return _first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _ask_all(
    url: str,
    chains: Sequence[Sequence[dict[str, Any]]],
    in_flight: int,
    tell: Callable[[int], None],
) -> list[Reply]:
    # No limit on reading: a long prompt behind others may take minutes.
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=in_flight)
    gate = asyncio.Semaphore(in_flight)
    num_done = 0

    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:

        async def run(chain: Sequence[dict[str, Any]]) -> Reply:
            nonlocal num_done
            async with gate:
                replies = [await ask(client, body) for body in chain]
            num_done += 1
            tell(num_done)
            return replies[-1]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(chain)) for chain in chains]
    return [task.result() for task in tasks]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
    """Send one chat request.

    Raises:
        RequestFailed: If it is refused, or the server breaks off.
    """
    try:
        response = await client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise RequestFailed(f"HTTP {response.status_code}: {response.text[:500]}")
    return read_reply(response.json())


async def ask_streamed(
    client: httpx.AsyncClient, body: dict[str, Any], has_begun: asyncio.Event
) -> Reply:
    """Send one chat request without tools as a stream.

    Args:
        client: Sends it.
        body: As without a stream.
        has_begun: Set when the first text arrives, at the latest when the stream ends.

    Raises:
        RequestFailed: If it is refused, or the server breaks off.
    """
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    texts = {"content": "", "reasoning_content": ""}
    choice: dict[str, Any] = {"message": texts, "finish_reason": None}
    usage = None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=streamed) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise RequestFailed(f"HTTP {response.status_code}: {text[:500]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                for each in chunk["choices"]:
                    choice["finish_reason"] = each["finish_reason"]
                    for name in texts:
                        texts[name] += each["delta"].get(name) or ""
                if any(texts.values()):
                    has_begun.set()
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    finally:
        has_begun.set()
    if usage is None or choice["finish_reason"] is None:
        raise RequestFailed("the stream broke off")
    return read_reply({"choices": [choice], "usage": usage})


def read_reply(answer: dict[str, Any]) -> Reply:
    """The parts of a chat completion that are scored."""
    choice, usage = answer["choices"][0], answer["usage"]
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return Reply(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=[(each["name"], each["arguments"]) for each in functions],
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
        completion_tokens=usage["completion_tokens"],
    )
