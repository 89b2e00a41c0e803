"""Puts chat deltas together: into a whole message, or into fewer deltas."""

from __future__ import annotations

from typing import Any

_TEXTS = ("reasoning_content", "content")


class MessageBuilder:
    """Adds deltas up to the `message` of an answer."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, deltas: list[dict[str, Any]]) -> None:
        """Add deltas in the order in which they came."""
        for delta in deltas:
            for name in _TEXTS:
                if delta.get(name):
                    self._texts.setdefault(name, []).append(delta[name])
            for call in delta.get("tool_calls") or ():
                self._add_call(call)

    def build(self) -> dict[str, Any]:
        """Return the message; absent parts are null, as OpenAI has them."""
        content = "".join(self._texts.get("content", ()))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
        }
        if "reasoning_content" in self._texts:
            message["reasoning_content"] = "".join(self._texts["reasoning_content"])
        if self._calls:
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": "".join(call["parts"])}}
                for _, call in sorted(self._calls.items())
            ]
            for call in message["tool_calls"]:
                del call["parts"]
        return message

    def _add_call(self, delta: dict[str, Any]) -> None:
        function = delta.get("function") or {}
        call = self._calls.setdefault(
            delta["index"],
            {
                "index": delta["index"],
                "id": delta.get("id"),
                "type": delta.get("type", "function"),
                "function": {"name": function.get("name"), "arguments": ""},
                "parts": [],
            },
        )
        if function.get("arguments"):
            call["parts"].append(function["arguments"])


def merge_deltas(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring deltas of one kind, so that waiting costs chunks and no text."""
    merged: list[dict[str, Any]] = []
    for delta in deltas:
        (name, value), *more = delta.items()
        is_text = name in _TEXTS and not more
        if is_text and merged and list(merged[-1]) == [name]:
            merged[-1] = {name: merged[-1][name] + value}
        else:
            merged.append(delta)
    return merged
