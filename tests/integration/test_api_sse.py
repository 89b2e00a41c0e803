"""Event streams by themselves: order, keep-alive, backpressure, who is cancelled when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsserve.entrypoints.sse import DONE, KEEP_ALIVE, EventBuffer, EventStreamResponse, event
from dsserve.errors import EngineLost

SCOPE: dict[str, Any] = {"type": "http"}


class Client:
    """The ASGI side of a client: collects what is sent, may stall or leave."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.left = asyncio.Event()
        self.has_comments = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.messages.append(message)
        if self.body.count(KEEP_ALIVE) >= 3:
            self.has_comments.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def test_events_come_in_order_then_done() -> None:
    async def produce(buffer: EventBuffer) -> None:
        for number in range(100):
            await buffer.push(event({"n": number}))

    client = Client()
    await EventStreamResponse(produce)(SCOPE, client.receive, client.send)
    assert client.body == b"".join(event({"n": n}) for n in range(100)) + DONE
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    headers = dict(client.messages[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers


@pytest.mark.parametrize(
    ("error", "code"), [(EngineLost("gone"), b"engine_lost"), (KeyError("x"), b"internal_error")]
)
async def test_error_is_the_last_event_without_done(error: Exception, code: bytes) -> None:
    async def produce(buffer: EventBuffer) -> None:
        await buffer.push(event(1))
        raise error

    client = Client()
    await EventStreamResponse(produce)(SCOPE, client.receive, client.send)
    first, last = client.body.strip().split(b"\n\n")
    assert first == b"data: 1"
    assert code in last
    assert b"KeyError" not in last
    assert DONE not in client.body


async def test_quiet_stream_gets_keep_alive_comments() -> None:
    client = Client()

    async def produce(buffer: EventBuffer) -> None:
        await client.has_comments.wait()
        await buffer.push(event(1))

    response = EventStreamResponse(produce, keep_alive_s=0.001)
    async with asyncio.timeout(30):
        await response(SCOPE, client.receive, client.send)
    assert client.body.replace(KEEP_ALIVE, b"") == event(1) + DONE


async def test_leaving_client_cancels_the_producer_and_waits_for_it() -> None:
    client = Client()
    cleaned_up = False

    async def produce(buffer: EventBuffer) -> None:
        nonlocal cleaned_up
        await buffer.push(event(1))
        client.left.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up = True

    async with asyncio.timeout(30):
        await EventStreamResponse(produce)(SCOPE, client.receive, client.send)
    assert cleaned_up


async def test_client_that_reads_nothing_is_cut_off() -> None:
    client = Client()
    client.reads.clear()
    cancelled = False

    async def produce(buffer: EventBuffer) -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        finally:
            cancelled = True

    response = EventStreamResponse(produce, stall_timeout_s=0.01)
    async with asyncio.timeout(30):
        await response(SCOPE, client.receive, client.send)
    assert cancelled


async def test_buffer_stops_the_producer_at_its_bound_and_loses_nothing() -> None:
    buffer = EventBuffer(max_bytes=100)
    pushed = 0

    async def produce() -> None:
        nonlocal pushed
        for _ in range(100):
            await buffer.push(b"0123456789")
            pushed += 1
        buffer.close()

    producing = asyncio.create_task(produce())
    for _ in range(50):
        await asyncio.sleep(0)
    assert pushed == 10, "ten times ten bytes fill it"
    taken = b""
    while (data := await buffer.take()) is not None:
        assert len(data) <= 110
        taken += data
    await producing
    assert taken == b"0123456789" * 100
