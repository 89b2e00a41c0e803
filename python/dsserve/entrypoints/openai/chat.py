"""`POST /v1/chat/completions`: messages in; content, reasoning and tool calls out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from dsserve.entrypoints.body import body_size, read_object, request_schema, validate
from dsserve.entrypoints.errors import OrjsonResponse
from dsserve.entrypoints.generation import Generation, run_all
from dsserve.entrypoints.openai.answer import Frame, build_frame
from dsserve.entrypoints.openai.fields import CHAT, refuse_unsupported
from dsserve.entrypoints.openai.message import MessageBuilder, merge_deltas
from dsserve.entrypoints.openai.protocol import ChatBody
from dsserve.entrypoints.openai.sampling import Limits, build_requests, check_text_len
from dsserve.entrypoints.openai.urgency import urgency_of
from dsserve.entrypoints.sse import EventBuffer, EventStreamResponse, event, until_disconnect
from dsserve.entrypoints.state import ServerState, state_of
from dsserve.errors import Unsupported
from dsserve.frontend.output import finish_reason, usage
from dsserve.protocol.engine import FinishCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsserve.chat.recipe import ChatJob
    from dsserve.chat.stream import ChatStream
    from dsserve.entrypoints.generation import Choice
    from dsserve.frontend.client import OutputDelta
    from dsserve.frontend.detokenize import TextCodec

router = APIRouter()

_ANSWER_KIND = "chat.completion"
_CHUNK_KIND = "chat.completion.chunk"


@router.post("/v1/chat/completions", openapi_extra=request_schema(ChatBody))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    state = state_of(request)
    raw = refuse_unsupported(await read_object(request), CHAT)
    size = await body_size(request)
    body = validate(ChatBody, raw)
    _refuse_text_options(body)
    state.check_takes_requests()
    model = state.check_model(body.model)
    raw |= {"model": model, "seed": None}  # the seed is ours: the recipe knows no negative one
    check_text_len(state, _prompt_len(body.messages), param="messages")
    job = await state.in_thread(state.converter.convert, raw, size=size)
    call = _prepare(state, request, body, job, arrival_s)
    if not body.stream:
        return OrjsonResponse(await until_disconnect(request, call.answer()))
    await until_disconnect(request, call.generation.start())
    return EventStreamResponse(call.stream)


def _prompt_len(messages: list[dict[str, Any]]) -> int:
    """Characters that are in the prompt in any case; reasoning of earlier turns may not be."""
    contents = [message.get("content") for message in messages]
    return sum(len(content) for content in contents if isinstance(content, str))


def _refuse_text_options(body: ChatBody) -> None:
    """Chat output is parsed by token, stop strings included; these act on plain text."""
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        if getattr(body, name):
            raise Unsupported(f"'{name}' works for /v1/completions only", param=name)


def _prepare(
    state: ServerState, request: Request, body: ChatBody, job: ChatJob, arrival_s: float
) -> _Call:
    limits = Limits(
        temperature=job.temperature,
        top_p=job.top_p,
        seed=body.seed,
        max_new_tokens=job.max_tokens,
    )
    urgency = urgency_of(state, request, body, arrival_s=arrival_s)
    requests = build_requests(
        state, body, [job.prompt_ids], limits, arrival_s=arrival_s, urgency=urgency
    )
    frame = build_frame(
        request, body, prefix="chatcmpl-", model=job.model, fingerprint=state.model.fingerprint
    )
    return _Call(
        state=state,
        body=body,
        frame=frame,
        job=job,
        generation=Generation(state, requests, names=frame.names),
    )


class _ChatChoice:
    """One choice: its engine request and the parser of its output."""

    def __init__(
        self, choice: Choice, parser: ChatStream, codec: TextCodec, stops: Sequence[str]
    ) -> None:
        self._codec = codec
        self._stops = stops
        self.choice = choice
        self.parser = parser
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.matched_stop: int | str | None = None

    async def push(self, delta: OutputDelta) -> tuple[list[dict[str, Any]], list[int]]:
        """Take the next output; return the deltas that it completes, and the ids that count."""
        if delta.finish_code in (FinishCode.ABORT, FinishCode.DEADLINE):
            deltas = self.parser.push(delta.token_ids)
            self.parser.close()
            self.finish_reason = finish_reason(delta.finish_code)
        else:
            deltas = self.parser.push(delta.token_ids, delta.finish_code)
            self.finish_reason = self.parser.finish_reason
        fresh = delta.token_ids[: max(0, self.parser.kept_tokens - len(self.token_ids))]
        self.token_ids += fresh
        if self.parser.finished:
            # The engine does not know of a stop string or of a parser that wants no more.
            await self.choice.finish(self.parser.kept_tokens)
        if self.parser.stopped_by_text:
            self.matched_stop = self._codec.completed_stop(self._stops, self.token_ids)
        elif delta.finish_code is FinishCode.STOP_TOKEN and delta.token_ids:
            self.matched_stop = delta.token_ids[-1]
        counts = self.choice.counts
        counts.completion = self.parser.kept_tokens
        counts.reasoning = self.parser.reasoning_tokens
        return deltas, fresh


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One chat call, ready to run as an answer or as a stream."""

    state: ServerState
    body: ChatBody
    frame: Frame
    job: ChatJob
    generation: Generation

    async def answer(self) -> dict[str, Any]:
        """Run all choices and return the whole answer."""
        async with self.generation:
            choices = self.generation.choices
            objects = await run_all(
                [self._complete(index, choice) for index, choice in enumerate(choices)]
            )
            answer = self.frame.wrap(_ANSWER_KIND, objects) | {"usage": self._usage()}
            return answer | self._prompt_ids()

    async def stream(self, buffer: EventBuffer) -> None:
        """Run all choices and push their chunks."""
        choices = self.generation.choices
        try:
            for index, choice in enumerate(choices):
                await buffer.push(self._role_event(index, choice))
            await run_all(
                [self._stream(index, choice, buffer) for index, choice in enumerate(choices)]
            )
            if self._has_usage_chunk:
                chunk = self.frame.wrap(_CHUNK_KIND, []) | {"usage": self._usage()}
                await buffer.push(event(chunk))
        finally:
            self.generation.close()

    async def _complete(self, index: int, choice: Choice) -> dict[str, Any]:
        parser = self.job.open_stream(index)
        try:
            source = _ChatChoice(choice, parser, self.state.codec, self.job.stop)
            message = MessageBuilder()
            async for output in choice:
                deltas, _ = await source.push(output)
                message.add(deltas)
            value = {
                "index": index,
                "message": message.build(),
                "logprobs": None,
                "finish_reason": source.finish_reason,
                "matched_stop": source.matched_stop,
            }
            if self.body.return_token_ids:
                value["token_ids"] = source.token_ids
            return value
        finally:
            parser.close()

    async def _stream(self, index: int, choice: Choice, buffer: EventBuffer) -> None:
        parser = self.job.open_stream(index)
        try:
            source = _ChatChoice(choice, parser, self.state.codec, self.job.stop)
            interval = self.state.config.stream_interval
            pending: list[dict[str, Any]] = []
            ids: list[int] = []
            num_pending = interval  # the first token goes out at once
            async for output in choice:
                deltas, fresh = await source.push(output)
                pending += deltas
                ids += fresh
                num_pending += len(fresh)
                is_over = source.finish_reason is not None
                if not is_over and (num_pending < interval or not (pending or self._sends_ids)):
                    continue
                await buffer.push(self._events(index, source, merge_deltas(pending), ids))
                pending, ids, num_pending = [], [], 0
        finally:
            parser.close()

    def _events(
        self, index: int, source: _ChatChoice, deltas: list[dict[str, Any]], ids: list[int]
    ) -> bytes:
        """Return the chunks for some deltas; the finish reason has one of its own."""
        if not deltas and ids and self._sends_ids:
            deltas = [{}]
        chunks = []
        for delta in deltas:
            value = self._choice(index, delta)
            if self._sends_ids:
                value["token_ids"], ids = ids, []
            chunks.append(self._chunk(value, source.choice))
        if source.finish_reason is not None:
            value = self._choice(index, {}) | {
                "finish_reason": source.finish_reason,
                "matched_stop": source.matched_stop,
            }
            if self._sends_ids:
                value["token_ids"] = ids
            chunks.append(self._chunk(value, source.choice))
        return b"".join(map(event, chunks))

    def _role_event(self, index: int, choice: Choice) -> bytes:
        chunk = self._chunk(self._choice(index, {"role": "assistant", "content": ""}), choice)
        return event(chunk | self._prompt_ids())

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, value: dict[str, Any], choice: Choice) -> dict[str, Any]:
        chunk = self.frame.wrap(_CHUNK_KIND, [value])
        if self.body.has_continuous_usage():
            chunk["usage"] = usage([choice.counts])
        elif value["finish_reason"] is not None and self._has_usage_in_last:
            chunk["usage"] = self._usage()
        elif self._has_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        return usage([choice.counts for choice in self.generation.choices])

    @property
    def _has_usage_chunk(self) -> bool:
        return self.body.includes_usage() and not self._has_usage_in_last

    @property
    def _has_usage_in_last(self) -> bool:
        return self.state.config.api_profile == "deepseek"

    @property
    def _sends_ids(self) -> bool:
        return bool(self.body.return_token_ids)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.job.prompt_ids} if self._sends_ids else {}
