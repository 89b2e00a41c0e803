"""What does a reader see of one request: deltas, their merging, acceptance, failure, leaving?"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self

from dsserve.errors import DsserveError
from dsserve.frontend.detokenize import TextDelta
from dsserve.protocol.engine import FinishCode


@dataclass(slots=True)
class OutputDelta:
    """What is new for one request since the stream was last read.

    Attributes:
        finish_code: Not `NONE` on the last delta, and only there.
        output_len: All output tokens so far; after a stop string it may be less than the sum of
            the deltas, since ids past the kept ones do not count.
        accepted_drafts: Of the output tokens so far, those that were drafted.
        rejected_drafts: Other draft tokens so far that were verified.
        text: The text of the ids, for requests submitted with `text`. If it has a stop, the
            engine was told already.
    """

    token_ids: list[int]
    finish_code: FinishCode
    prompt_len: int
    cached_len: int
    output_len: int
    text: TextDelta | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class RequestStream:
    """The output of one request: iterate it until the delta with a finish code.

    Leaving early (`close`, or the end of an `async with` block) aborts the request.
    """

    def __init__(self, request_id: int, abandon: Callable[[int], None]) -> None:
        """Open a stream; `abandon` is called with the request's id when its reader leaves."""
        self.request_id = request_id
        self._abandon = abandon
        self._pending: OutputDelta | None = None
        self._texts: list[str] = []  # of the pending delta
        self._error: DsserveError | None = None
        self._changed = asyncio.Event()
        self._is_accepted = False
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether the engine may still send something for it."""
        return not self._is_over

    async def accepted(self) -> None:
        """Wait until the scheduler has taken the request.

        Raises:
            DsserveError: The rejection, or the loss of the engine.
        """
        while not self._is_accepted and self._error is None:
            await self._wait()
        if not self._is_accepted and self._error is not None:
            raise self._error

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        while True:
            if self._pending is not None:
                delta, self._pending = self._pending, None
                if delta.text is not None and len(self._texts) > 1:
                    delta.text = delta.text._replace(text="".join(self._texts))
                self._texts.clear()
                return delta
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            await self._wait()

    def close(self) -> None:
        """Stop reading; aborts the request if it has not ended. A second call does nothing."""
        self._abandon(self.request_id)
        self._is_over = True
        self._changed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def accept(self) -> None:
        """Called by the client: the scheduler has the request."""
        self._is_accepted = True
        self._changed.set()

    def push(self, delta: OutputDelta) -> None:
        """Called by the client: new tokens or the end."""
        self._is_accepted = True
        pending = self._pending
        if pending is None:
            self._pending = delta
        else:
            pending.token_ids.extend(delta.token_ids)
            pending.finish_code = delta.finish_code
            pending.cached_len = delta.cached_len
            pending.output_len = delta.output_len
            pending.accepted_drafts = delta.accepted_drafts
            pending.rejected_drafts = delta.rejected_drafts
            if delta.text is not None:
                pending.text = delta.text
        if delta.text is not None:
            self._texts.append(delta.text.text)
        self._is_over = delta.finish_code is not FinishCode.NONE
        self._changed.set()

    def fail(self, error: DsserveError) -> None:
        """Called by the client: what is pending can still be read, then `error` is raised."""
        if not self._is_over:
            self._error = error
            self._is_over = True
            self._changed.set()
