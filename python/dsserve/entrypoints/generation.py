"""The engine requests behind one HTTP request: submitted together, watched, and never left behind."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self

from dsserve.errors import DsserveError, NotReady
from dsserve.frontend.output import TokenCounts, finish_error
from dsserve.protocol.engine import FinishCode

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from dsserve._native import StreamOptions
    from dsserve.entrypoints.state import ServerState
    from dsserve.frontend.client import OutputDelta, RequestStream
    from dsserve.protocol.engine import EngineRequest


_GOOD_ENDS = frozenset({"stop_token", "stop_string", "length"})


class Choice:
    """One engine request and what was seen of it: iterate it for its output.

    The iteration ends after the delta with a finish code. Codes that stand for an error raise.

    Attributes:
        counts: Token counts so far; whoever reads the text corrects `completion` after a stop string.
    """

    def __init__(
        self,
        state: ServerState,
        request: EngineRequest,
        stream: RequestStream,
        names: tuple[str, ...],
    ) -> None:
        self.request = request
        self._names = names
        self._logged_ids: list[int] = []
        self.counts = TokenCounts(prompt=len(request.token_ids) // 4)
        self._state = state
        self._stream = stream
        self._is_over = False
        self._last_s: float | None = None

    async def accepted(self) -> None:
        """Wait until the scheduler took the request.

        Raises:
            DsserveError: The rejection, or the loss of the engine.
        """
        try:
            await self._stream.accepted()
        except DsserveError:
            self._end("rejected")
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._is_over:
            raise StopAsyncIteration
        try:
            delta = await anext(self._stream)
        except DsserveError:
            self._end("lost")
            raise
        self._observe(delta)
        if delta.finish_code is not FinishCode.NONE:
            self._end_by(delta.finish_code, delta.output_len)
        return delta

    async def finish(self, kept_tokens: int) -> None:
        """Tell the engine that the text ended after `kept_tokens` ids, and see the request end."""
        if not self._is_over:
            self._state.client.finish(self.request.request_id, kept_tokens)
        await self.stopped(kept_tokens)

    async def stopped(self, kept_tokens: int) -> None:
        """See the request end, of which the engine knows that it ended after `kept_tokens` ids."""
        self.counts.completion = kept_tokens
        if self._is_over:
            return
        async for delta in self._stream:
            if delta.finish_code is not FinishCode.NONE:
                self._end("stop_string")

    def close(self) -> None:
        """Abort the request if it has not ended; a second call does nothing."""
        if not self._is_over:
            self._end("abort")
        self._stream.close()

    def _observe(self, delta: OutputDelta) -> None:
        self.counts.prompt = delta.prompt_len
        self.counts.cached = delta.cached_len
        self.counts.completion = delta.output_len
        if self._state.draft_len:
            self.counts.accepted = delta.accepted_drafts
            self.counts.rejected = delta.rejected_drafts
        if not delta.token_ids:
            return
        if self._state.request_log.wants_texts:
            self._logged_ids += delta.token_ids
        metrics = self._state.metrics
        now_s = time.monotonic()
        if self._last_s is None:
            metrics.time_to_first_token.observe(now_s - self.request.arrival_s)
        else:
            metrics.inter_token_latency.observe((now_s - self._last_s) / len(delta.token_ids))
        self._last_s = self._state.last_token_s = now_s
        metrics.generation_tokens.inc(len(delta.token_ids))

    def _end_by(self, code: FinishCode, output_len: int) -> None:
        """Note the engine's last word.

        Raises:
            DsserveError: If it stands for an error.
        """
        self._end(code.name.lower())
        error = finish_error(code, output_len=output_len)
        if error is not None:
            raise error
        if code is FinishCode.ABORT and self._state.is_draining:
            raise NotReady(
                "the server shut down before the answer was complete", code="shutting_down"
            )

    def _end(self, reason: str) -> None:
        self._is_over = True
        self._state.live.remove(self.request.request_id)
        self._state.request_log.ended(
            self.request, self._names, self.counts, reason, self._logged_ids
        )
        metrics = self._state.metrics
        metrics.requests.inc()
        if self._last_s is not None or reason in _GOOD_ENDS:
            # Prompts that were refused, dropped or left while they waited had no chance of a hit.
            metrics.prompt_tokens.inc(self.counts.prompt)
            metrics.count_cached(self.counts.cached)
            metrics.prompt_tokens_histogram.observe(self.counts.prompt)
            metrics.generation_tokens_histogram.observe(self.counts.completion)
        metrics.request_latency.observe(time.monotonic() - self.request.arrival_s)
        if reason == "abort":
            metrics.count_aborted("shutdown" if self._state.is_draining else "client")
        elif reason not in _GOOD_ENDS:
            metrics.count_aborted(reason)


class Generation:
    """All choices of one HTTP request.

    With `text` the deltas of its choices have text. Use it as an async context manager, or call
    `close` in the end: whatever has not ended is aborted then, once.
    """

    def __init__(
        self,
        state: ServerState,
        requests: Sequence[EngineRequest],
        *,
        names: tuple[str, ...],
        text: StreamOptions | None = None,
    ) -> None:
        self._state = state
        self._text = text
        self._requests = requests
        self._names = names
        self.choices: list[Choice] = []

    async def start(self) -> None:
        """Submit every request and wait until the scheduler took them all.

        Raises:
            DsserveError: The first rejection; the others are aborted.
        """
        try:
            for request in self._requests:
                stream = self._state.client.submit(request, self._text)
                self._state.live.add(request.request_id, self._names)
                self._state.request_log.taken(request, self._names)
                self.choices.append(Choice(self._state, request, stream, self._names))
            for choice in self.choices:
                await choice.accepted()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what has not ended."""
        for choice in self.choices:
            choice.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def run_all(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines together; the first failure cancels the others and is raised as it is."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
