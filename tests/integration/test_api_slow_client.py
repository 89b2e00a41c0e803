"""A client that does not read, over a real socket: what is kept for it is bounded, nothing is lost."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING

import pytest
import uvicorn

from dsserve.entrypoints.sse import DONE, MAX_BUFFERED_BYTES, EventBuffer, EventStreamResponse
from dsserve.frontend.detokenize import TextDelta
from dsserve.frontend.stream import OutputDelta, RequestStream
from dsserve.protocol.engine import FinishCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Receive, Scope, Send

EVENT = b"data: " + b"x" * 8184 + b"\n\n"
NUM_EVENTS = 4096  # 32 MiB
# What the system's socket buffers and the HTTP server's own may take on top.
SYSTEM_BYTES = 12 * 1024 * 1024


class Producer:
    """An endpoint that makes events as fast as it may."""

    def __init__(self) -> None:
        self.num_pushed = 0
        self.is_blocked = threading.Event()
        self.has_ended = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        try:
            await EventStreamResponse(self.produce)(scope, receive, send)
        finally:
            self.has_ended.set()

    async def produce(self, buffer: EventBuffer) -> None:
        for _ in range(NUM_EVENTS):
            pushing = asyncio.ensure_future(buffer.push(EVENT))
            done, _ = await asyncio.wait({pushing}, timeout=0.5)
            if not done:
                self.is_blocked.set()
            await pushing
            self.num_pushed += 1


@pytest.fixture
def served() -> Iterator[tuple[Producer, int]]:
    producer = Producer()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(producer, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield producer, listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join()
    listener.close()


def connect(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    return client


def test_events_for_a_client_that_does_not_read_are_bounded_and_not_lost(
    served: tuple[Producer, int],
) -> None:
    producer, port = served
    with connect(port) as client:
        assert producer.is_blocked.wait(60)
        kept_bytes = producer.num_pushed * len(EVENT)
        assert kept_bytes <= MAX_BUFFERED_BYTES + SYSTEM_BYTES < NUM_EVENTS * len(EVENT)
        answer = bytearray()
        while data := client.recv(1 << 20):
            answer += data
    assert answer.count(EVENT) == NUM_EVENTS
    assert DONE in answer[-100:]


def test_a_client_that_leaves_without_reading_ends_its_producer(
    served: tuple[Producer, int],
) -> None:
    producer, port = served
    with connect(port):
        assert producer.is_blocked.wait(60)
    assert producer.has_ended.wait(60)
    assert producer.num_pushed < NUM_EVENTS


async def test_deltas_that_nobody_reads_become_one() -> None:
    stream = RequestStream(1, lambda _: None)
    stops = {9_999: "END"}
    for number in range(10_000):
        stream.push(
            OutputDelta(
                token_ids=[number],
                finish_code=FinishCode.NONE,
                prompt_len=1,
                cached_len=0,
                output_len=number + 1,
                text=TextDelta(f"{number} ", stops.get(number), number + 1, number + 1),
            )
        )
    delta = await anext(stream)
    assert delta.token_ids == list(range(10_000))
    assert delta.text is not None
    assert delta.text.text == "".join(f"{number} " for number in range(10_000))
    assert (delta.text.stop, delta.text.kept_tokens) == ("END", 10_000)
    stream.push(
        OutputDelta(
            token_ids=[],
            finish_code=FinishCode.STOP_STRING,
            prompt_len=1,
            cached_len=0,
            output_len=10_000,
        )
    )
    last = await anext(stream)
    assert last.text is None
