"""Reads server-sent events of a finished or running stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

DONE = "[DONE]"


def parse_events(text: str) -> list[Any]:
    """The payloads of all events; `[DONE]` stays a string. Comments are left out."""
    events: list[Any] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        assert len(lines) == 1, f"one line per event, not {lines}"
        assert lines[0].startswith("data: "), lines[0]
        data = lines[0].removeprefix("data: ")
        events.append(DONE if data == DONE else json.loads(data))
    return events


def whole_stream(response: httpx.Response) -> list[Any]:
    """The chunks of a stream that ended well, without `[DONE]`."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = parse_events(response.text)
    assert events[-1] == DONE
    assert DONE not in events[:-1]
    return events[:-1]
