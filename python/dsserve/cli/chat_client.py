"""The HTTP side of `dsserve chat`: asks a server with the OpenAI protocol and reads its event stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONNECT_TIMEOUT_S = 5.0


class ChatFailed(Exception):  # noqa: N818 - reads as what happened
    """The server cannot be reached, refuses, or breaks off; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One event of a streamed answer.

    Attributes:
        tool_calls: Pieces of tool calls, as text to show.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[str, ...] = ()
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class ChatClient:
    """A server at `base_url`, with or without a trailing `/v1`."""

    def __init__(
        self, base_url: str, api_key: str | None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No limit on reading: a long prompt may take minutes before its first token.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport)

    def first_model(self) -> str:
        """Return the name of the first model of the server.

        Raises:
            ChatFailed: If there is no server, or it refuses.
        """
        try:
            response = self._http.get(f"{self._base_url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if response.is_error:
            raise ChatFailed(_error_text(response))
        try:
            name: str = response.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise ChatFailed(f"{self._base_url} does not answer as an OpenAI server") from None
        return name

    def stream(self, body: dict[str, Any]) -> Iterator[Delta]:
        """Send a chat request with `stream: true` and yield its events.

        Raises:
            ChatFailed: If the server cannot be reached, refuses, or breaks off.
        """
        url = f"{self._base_url}/v1/chat/completions"
        try:
            with self._http.stream("POST", url, json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatFailed(_error_text(response))
                yield from _read_events(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> ChatFailed:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ChatFailed(
                f"no server at {self._base_url}; start one with `dsserve launch`, or give its address by "
                "--base-url"
            )
        return ChatFailed(f"{self._base_url}: {str(error) or type(error).__name__}")


def _read_events(lines: Iterator[str]) -> Iterator[Delta]:
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ChatFailed("the server sent an event that is no JSON") from None
        if "error" in event:
            raise ChatFailed(str(event["error"].get("message", event["error"])))
        yield _delta(event)
    raise ChatFailed("the server broke off the answer")


def _delta(event: dict[str, Any]) -> Delta:
    choice = (event.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    functions = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    return Delta(
        content=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or "",
        tool_calls=tuple(
            f"{' ' + each['name'] + ' ' if each.get('name') else ''}{each.get('arguments') or ''}"
            for each in functions
        ),
        finish_reason=choice.get("finish_reason"),
        usage=event.get("usage"),
    )


def _error_text(response: httpx.Response) -> str:
    try:
        return f"{response.json()['error']['message']} (HTTP {response.status_code})"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status_code} from {response.url}"
