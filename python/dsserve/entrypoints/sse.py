"""Server-sent events: framing, keep-alive comments, slow clients, and who notices that a client left."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from dsserve.errors import Cancelled, DsserveError, error_body

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
CLIENT_STALL_TIMEOUT_S = 300.0
MAX_BUFFERED_BYTES = 1 << 20

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


def event(payload: Any) -> bytes:
    """Return one event that carries `payload` as JSON."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def error_event(error: BaseException) -> bytes:
    """Return the event that ends a stream in which something failed."""
    if isinstance(error, DsserveError):
        return event(error.body())
    return event(
        error_body(
            "internal error; the server's log has the details",
            error_type="internal_error",
            code="internal_error",
        )
    )


class EventBuffer:
    """Bytes between the tasks that make events and the one that sends them to the client.

    Bounded: `push` waits while the client is behind. Tokens then gather in the request's own stream,
    and the next event carries them together.

    Args:
        max_bytes: `push` waits once this much is buffered.
        keep_alive_s: A comment line is inserted whenever nothing was pushed for that long.
    """

    def __init__(
        self, *, max_bytes: int = MAX_BUFFERED_BYTES, keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        self._max_bytes = max_bytes
        self._keep_alive_s = keep_alive_s
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._has_data = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_closed = False
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(keep_alive_s, self._keep_alive)

    async def push(self, data: bytes) -> None:
        """Add the bytes of one or more whole events; waits for room first."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        self._is_quiet = False
        self._append(data)

    def close(self) -> None:
        """Say that nothing more comes; what is buffered is still sent."""
        self._is_closed = True
        self._timer.cancel()
        self._has_data.set()

    async def take(self) -> bytes | None:
        """Return everything buffered, as soon as there is something; None once closed and empty."""
        await self._has_data.wait()
        if not self._parts:
            return None
        data = b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        self._has_room.set()
        if not self._is_closed:
            self._has_data.clear()
        return data

    def _append(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_bytes += len(data)
        self._has_data.set()
        if self._num_bytes >= self._max_bytes:
            self._has_room.clear()

    def _keep_alive(self) -> None:
        if self._is_quiet and not self._parts:
            self._append(KEEP_ALIVE)
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._keep_alive)


class EventStreamResponse(Response):
    """Streams what a producer pushes, and cancels the producer when the client leaves or stalls.

    The producer ends the stream by returning (then `[DONE]` follows) or by raising (then one error
    event follows, and no `[DONE]`). It is always awaited before the response ends, so whatever it
    releases on its way out is released.
    """

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(
        self,
        producer: Callable[[EventBuffer], Coroutine[Any, Any, None]],
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        stall_timeout_s: float = CLIENT_STALL_TIMEOUT_S,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._producer = producer
        self._keep_alive_s = keep_alive_s
        self._stall_timeout_s = stall_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        buffer = EventBuffer(keep_alive_s=self._keep_alive_s)
        producing = asyncio.create_task(self._produce(buffer))
        leaving = asyncio.create_task(_wait_for_disconnect(receive))
        sending = asyncio.create_task(self._send(buffer, send))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (producing, leaving, sending):
                task.cancel()
            await asyncio.gather(producing, leaving, sending, return_exceptions=True)
            buffer.close()
        if sending.cancelled():
            return
        failure = sending.exception()
        if isinstance(failure, TimeoutError):
            logger.info("a client read nothing for %g s; its request ends", self._stall_timeout_s)
        elif failure is not None and not isinstance(failure, OSError):
            raise failure

    async def _produce(self, buffer: EventBuffer) -> None:
        try:
            await self._producer(buffer)
            await buffer.push(DONE)
        except DsserveError as error:
            await buffer.push(error_event(error))
        except Exception as error:  # the edge of the stream: logged, told, ended
            logger.exception("a stream failed")
            await buffer.push(error_event(error))
        finally:
            buffer.close()

    async def _send(self, buffer: EventBuffer, send: Send) -> None:
        await self._send_one(
            send,
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            },
        )
        while (data := await buffer.take()) is not None:
            await self._send_one(
                send, {"type": "http.response.body", "body": data, "more_body": True}
            )
        await self._send_one(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_one(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._stall_timeout_s):
            await send(message)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work`, but cancel it as soon as the client leaves.

    Args:
        request: The request, with its body read.
        work: What to run; it cleans up when it is cancelled.

    Returns:
        What `work` returned.

    Raises:
        Cancelled: If the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client left")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
