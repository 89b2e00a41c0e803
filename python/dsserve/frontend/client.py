"""How does the API process send requests to the engine process and get their tokens back?

One `EngineClient` per engine process, on one event loop. Requests submitted in the same turn of the
loop travel in one message; outputs arrive as one message per step and are handed to the streams of
their requests. A stream that is not read merges what arrives, so a slow reader costs no more memory
than its own tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from dsserve.errors import (
    DsserveError,
    EngineFault,
    EngineLost,
    NotReady,
    Overloaded,
    rejection_error,
)
from dsserve.frontend.stream import OutputDelta, RequestStream
from dsserve.protocol import engine as wire
from dsserve.protocol.engine import EngineRequest, FinishCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsserve._native import StreamOptions
    from dsserve.frontend.detokenize import Detokenizer, TextDelta

__all__ = ["EngineClient", "OutputDelta", "RequestStream"]

logger = logging.getLogger(__name__)

HEARTBEAT_LIMIT_S = 10.0
"""An engine whose last heartbeat is older does not count as alive."""

MAX_UNSENT_MESSAGES = 16384
"""Messages kept for an engine that does not read; beyond that new requests are refused."""

RECEIVE_BURST = 32
"""Messages read before other tasks of the event loop get their turn."""


class EngineClient:
    """The engine as seen from the API process.

    Attributes:
        detokenizer: Turns the outputs of a step into text, for requests submitted with `text`;
            set by whoever loads the tokenizer.
    """

    def __init__(
        self,
        ipc_dir: str | Path,
        *,
        on_progress: Callable[[wire.LoadProgress], None] | None = None,
    ) -> None:
        """Prepare a client; nothing happens before `start`.

        Args:
            ipc_dir: Directory of mode 0700 for both sockets, shared with the engine process.
            on_progress: Told about each step of loading.
        """
        self.detokenizer: Detokenizer | None = None
        self._ipc_dir = Path(ipc_dir)
        self._on_progress = on_progress
        self._streams: dict[int, RequestStream] = {}
        self._ids = itertools.count(1)
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[wire.Reply]] = {}
        self._submits: list[EngineRequest] = []
        self._unsent: deque[bytes] = deque()
        self._has_unsent = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: DsserveError | None = None
        self._info: dict[str, Any] | None = None
        self._ready = asyncio.Event()
        self._beat: wire.Heartbeat | None = None
        self._beat_time_s = 0.0

    async def start(self) -> None:
        """Bind and connect the sockets and say hello. The engine process may start later."""
        self._context = zmq.asyncio.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.setsockopt(zmq.LINGER, 0)
        self._receiver.bind(f"ipc://{self._ipc_dir / wire.FROM_ENGINE_SOCKET}")
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.setsockopt(zmq.LINGER, 0)
        self._sender.connect(f"ipc://{self._ipc_dir / wire.TO_ENGINE_SOCKET}")
        self._send(wire.Hello(process_id=os.getpid()))
        for name, body in (("receive", self._receive()), ("send", self._send_all())):
            task = asyncio.create_task(body, name=f"engine client {name}")
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    async def wait_ready(self) -> dict[str, Any]:
        """Wait until the engine takes requests; returns `Ready.info`.

        Raises:
            EngineFault: The engine ended or could not start.
        """
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self.info

    async def close(self) -> None:
        """Close the sockets. Open streams and queries fail with `EngineLost`."""
        self.fail_all(EngineLost("the server is shutting down"))
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._receiver.close(linger=0)
        self._sender.close(linger=0)
        self._context.term()

    @property
    def info(self) -> dict[str, Any]:
        """What the engine told when it was ready (resolved config, pool table, sizes, versions).

        Raises:
            NotReady: It is not ready yet.
        """
        if self._info is None:
            raise NotReady("the engine is still loading the model")
        return self._info

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._info is not None and self._failure is None

    @property
    def is_alive(self) -> bool:
        """Whether the step loop showed itself in the last 10 s; a long step does not stop it."""
        return self._failure is None and self.heartbeat_age_s < HEARTBEAT_LIMIT_S

    @property
    def failure(self) -> DsserveError | None:
        """Why the engine is lost, if it is."""
        return self._failure

    @property
    def last_heartbeat(self) -> wire.Heartbeat | None:
        """The newest heartbeat."""
        return self._beat

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the newest heartbeat came in; infinite before the first."""
        return self.silence_s if self._beat is not None else float("inf")

    @property
    def silence_s(self) -> float:
        """Seconds since the engine became ready, or since its newest heartbeat."""
        return time.monotonic() - self._beat_time_s

    @property
    def stats(self) -> dict[str, Any]:
        """Counters and levels of the newest heartbeat; empty before the first."""
        return self._beat.stats if self._beat is not None else {}

    @property
    def num_open_requests(self) -> int:
        """Requests submitted whose end was not seen yet."""
        return len(self._streams)

    def next_request_id(self) -> int:
        """Hand out an id that no other request of this client has."""
        return next(self._ids)

    def submit(self, request: EngineRequest, text: StreamOptions | None = None) -> RequestStream:
        """Send a request; await `RequestStream.accepted` to learn whether the scheduler took it.

        Args:
            request: The request.
            text: Its deltas shall have text, and it ends at a stop; `detokenizer` must be set.

        Raises:
            NotReady: The engine is still loading.
            EngineLost: The engine is gone.
            Overloaded: The engine does not read its messages.
            ValueError: A live request has this id.
        """
        if self._failure is not None:
            raise self._failure
        if self._info is None:
            raise NotReady("the engine is still loading the model", retry_after_s=5)
        if len(self._unsent) >= MAX_UNSENT_MESSAGES:
            raise Overloaded("the engine does not read its messages", retry_after_s=1)
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id} is in use")
        if text is not None:
            if self.detokenizer is None:
                raise ValueError("text was asked for, but the client has no detokenizer")
            self.detokenizer.open(text, name=request.request_id)
        stream = RequestStream(request.request_id, self.abandon)
        self._streams[request.request_id] = stream
        self._submits.append(request)
        self._has_unsent.set()
        return stream

    def abort(self, request_id: int) -> None:
        """End a request early; its stream gets a last delta. Ended and unknown ids do nothing."""
        if request_id in self._streams:
            self._send(wire.Abort(request_ids=wire.pack_u64([request_id])))

    def abort_all(self) -> None:
        """End every request of the engine."""
        self._send(wire.Abort(all=True))

    def finish(self, request_id: int, kept_tokens: int) -> None:
        """Say that a stop string ends the request after its first `kept_tokens` output ids."""
        if request_id in self._streams:
            self._send(wire.Finish(request_id=request_id, kept_tokens=kept_tokens))

    def abandon(self, request_id: int) -> None:
        """Abort a request, if it has not ended, whose stream nobody reads any more."""
        if request_id in self._streams:
            self.abort(request_id)
            del self._streams[request_id]
            self._close_text(request_id)

    def shutdown(self, grace_s: float) -> None:
        """Ask the engine to finish what runs within `grace_s`, abort the rest and exit with 0."""
        self._send(wire.Shutdown(grace_s=grace_s))

    async def query_state(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Ask for the scheduler's state after a full invariant check.

        Raises:
            EngineFault: The check failed, the engine is lost, or no answer came in time.
        """
        reply = await self._query(lambda query_id: wire.StateQuery(query_id=query_id), timeout_s)
        return reply.payload

    async def flush(self, timeout_s: float = 30.0) -> tuple[bool, list[int]]:
        """Empty the prefix cache; (False, ids of requests that hold pages) if it is in use.

        Raises:
            EngineFault: The engine is lost, or no answer came in time.
        """
        reply = await self._query(lambda query_id: wire.FlushCache(query_id=query_id), timeout_s)
        return reply.ok, list(reply.payload.get("holders", ()))

    def fail_all(self, error: DsserveError) -> None:
        """The engine is lost: end every open stream and query with `error`, refuse new requests.

        Only the first call counts.
        """
        if self._failure is not None:
            return
        self._failure = error
        self._ready.set()
        self._submits.clear()
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.fail(error)
            self._close_text(request_id)
        for query in self._queries.values():
            if not query.done():
                query.set_exception(error)

    async def _query(self, build: Callable[[int], wire.ToEngine], timeout_s: float) -> wire.Reply:
        if self._failure is not None:
            raise self._failure
        query_id = next(self._query_ids)
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        self._send(build(query_id))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EngineFault(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            del self._queries[query_id]

    def _send(self, message: wire.ToEngine) -> None:
        if self._failure is not None:
            return
        self._take_submits()  # a request must be on its way before its abort
        self._unsent.append(wire.encode(message))
        self._has_unsent.set()

    def _take_submits(self) -> None:
        if self._submits:
            self._unsent.append(wire.encode(wire.SubmitBatch(requests=self._submits)))
            self._submits = []

    async def _send_all(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            self._take_submits()
            while self._unsent:
                await self._sender.send(self._unsent.popleft())

    async def _receive(self) -> None:
        for count in itertools.count():
            if count % RECEIVE_BURST == 0:
                await asyncio.sleep(0)  # `recv` does not yield while messages are waiting
            frame = await self._receiver.recv()
            try:
                message = wire.decode_from_engine(frame)
            except msgspec.DecodeError as error:
                logger.error("dropped a malformed message of the engine: %s", error)  # noqa: TRY400 - the cause is the frame, a traceback says nothing
                continue
            self._handle(message)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs():
                self._handle_outputs(message)
            case wire.Heartbeat():
                self._beat, self._beat_time_s = message, time.monotonic()
            case wire.Accepted():
                for request_id in wire.unpack_u64(message.request_ids):
                    if (stream := self._streams.get(request_id)) is not None:
                        stream.accept()
            case wire.Rejected():
                if (stream := self._streams.pop(message.request_id, None)) is not None:
                    self._close_text(message.request_id)
                    stream.fail(rejection_error(message.code, message.message))
            case wire.Reply():
                query = self._queries.get(message.query_id)
                if query is not None and not query.done():
                    query.set_result(message)
            case wire.LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case wire.Ready():
                self._info = message.info
                self._beat_time_s = time.monotonic()  # it lives; the step loop starts now
                self._ready.set()
            case wire.Hello():
                if message.protocol_version != wire.PROTOCOL_VERSION:
                    self.fail_all(_version_error(message.protocol_version))
            case wire.Fatal():
                logger.error("the engine failed: %s", message.message)
                self.fail_all(EngineLost(f"the engine failed: {message.message}"))

    def _handle_outputs(self, outputs: wire.Outputs) -> None:
        offsets = wire.unpack_u32(outputs.token_offsets)
        token_ids = wire.unpack_u32(outputs.token_ids)
        prompt_lens = wire.unpack_u32(outputs.prompt_lens)
        cached_lens = wire.unpack_u32(outputs.cached_lens)
        output_lens = wire.unpack_u32(outputs.output_lens)
        accepted = wire.unpack_u32(outputs.accepted_drafts)
        rejected = wire.unpack_u32(outputs.rejected_drafts)
        texts: dict[int, TextDelta] = {}
        if self.detokenizer is not None:
            texts = self.detokenizer.step(outputs)
        for i, request_id in enumerate(wire.unpack_u64(outputs.request_ids)):
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # abandoned
            code = FinishCode(outputs.finish_codes[i])
            if code is not FinishCode.NONE:
                del self._streams[request_id]
            text = texts.get(i)
            if text is not None and text.stop is not None:
                self._finish_once(request_id, text.kept_tokens)
            stream.push(
                OutputDelta(
                    token_ids=token_ids[offsets[i] : offsets[i + 1]],
                    finish_code=code,
                    prompt_len=prompt_lens[i],
                    cached_len=cached_lens[i],
                    output_len=output_lens[i],
                    text=text,
                    accepted_drafts=accepted[i] if accepted else 0,
                    rejected_drafts=rejected[i] if rejected else 0,
                )
            )

    def _finish_once(self, request_id: int, kept_tokens: int) -> None:
        """Say that a stop was found; ids that were under way come without text."""
        self.finish(request_id, kept_tokens)
        self._close_text(request_id)

    def _close_text(self, request_id: int) -> None:
        if self.detokenizer is not None:
            self.detokenizer.close(request_id)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("%s ended", task.get_name(), exc_info=error)
            self.fail_all(EngineFault(f"the connection to the engine failed: {error}"))


def _version_error(version: int) -> EngineFault:
    return EngineFault(
        f"the engine process speaks protocol version {version}, this process "
        f"{wire.PROTOCOL_VERSION}; both must come from one installation"
    )
