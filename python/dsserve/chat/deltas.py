"""Collects the deltas of one push: neighbours merged, reasoning separate, held or inline."""

from typing import Any

_THINKING_START = "<think>"
_THINKING_END = "</think>"


class DeltaWriter:
    """Turns reasoning, content and calls into OpenAI `delta` objects."""

    def __init__(self, *, separate_reasoning: bool, stream_reasoning: bool) -> None:
        self._separate = separate_reasoning
        self._streams = stream_reasoning
        self._held: list[str] = []
        self._has_inline_reasoning = False
        self._deltas: list[dict[str, Any]] = []

    def reasoning(self, text: str) -> None:
        """Add reasoning; with `stream_reasoning` off it waits for `end_reasoning`."""
        if self._streams:
            self._write_reasoning(text)
        else:
            self._held.append(text)

    def content(self, text: str) -> None:
        """Add answer text."""
        self._close_reasoning()
        self._append_text("content", text)

    def calls(self, calls: list[dict[str, Any]]) -> None:
        """Add pieces of tool calls."""
        self._close_reasoning()
        for call in calls:
            last = self._deltas[-1].get("tool_calls") if self._deltas else None
            if last and "id" not in call and last[-1]["index"] == call["index"]:
                last[-1]["function"]["arguments"] += call["function"]["arguments"]
            elif last:
                last.append(call)
            else:
                self._deltas.append({"tool_calls": [call]})

    def end_reasoning(self) -> None:
        """Give out reasoning that was held; the stream ends."""
        if self._held:
            self._write_reasoning("".join(self._held))
            self._held.clear()

    def take(self) -> list[dict[str, Any]]:
        """Return the deltas collected since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _close_reasoning(self) -> None:
        self.end_reasoning()
        if self._has_inline_reasoning:
            self._has_inline_reasoning = False
            self._append_text("content", _THINKING_END)

    def _write_reasoning(self, text: str) -> None:
        if self._separate:
            self._append_text("reasoning_content", text)
            return
        if not self._has_inline_reasoning:
            self._has_inline_reasoning = True
            self._append_text("content", _THINKING_START)
        self._append_text("content", text)

    def _append_text(self, kind: str, text: str) -> None:
        if self._deltas and kind in self._deltas[-1]:
            self._deltas[-1][kind] += text
        else:
            self._deltas.append({kind: text})
