"""`POST /v1/completions`: text or token ids in, text out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from dsserve.entrypoints.body import read_object, request_schema, validate
from dsserve.entrypoints.errors import OrjsonResponse
from dsserve.entrypoints.generation import Generation, run_all
from dsserve.entrypoints.openai.answer import Frame, build_frame
from dsserve.entrypoints.openai.fields import COMPLETION, refuse_unsupported
from dsserve.entrypoints.openai.protocol import CompletionBody
from dsserve.entrypoints.openai.sampling import (
    Limits,
    build_requests,
    check_text_len,
    default_temperature,
    default_top_p,
    fit_context,
)
from dsserve.entrypoints.openai.text_choice import TextChoice, choice_object
from dsserve.entrypoints.openai.urgency import urgency_of
from dsserve.entrypoints.sse import EventBuffer, EventStreamResponse, event, until_disconnect
from dsserve.entrypoints.state import INLINE_TEXT_LENGTH, ServerState, state_of
from dsserve.errors import InvalidRequest
from dsserve.frontend.detokenize import TextOptions
from dsserve.frontend.output import usage

if TYPE_CHECKING:
    from dsserve._native import StreamOptions
    from dsserve.entrypoints.generation import Choice

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
MAX_TOTAL_CHOICES = 1024
_KIND = "text_completion"


@router.post("/v1/completions", openapi_extra=request_schema(CompletionBody))
async def create_completion(request: Request) -> Response:
    """Complete one or more prompts."""
    arrival_s = time.monotonic()
    state = state_of(request)
    raw = await read_object(request)
    body = validate(CompletionBody, refuse_unsupported(raw, COMPLETION))
    state.check_takes_requests()
    model = state.check_model(body.model)
    call = await _prepare(state, request, body, model, arrival_s)
    if not body.stream:
        return OrjsonResponse(await until_disconnect(request, call.answer()))
    await until_disconnect(request, call.generation.start())
    return EventStreamResponse(call.stream)


async def _prepare(
    state: ServerState, request: Request, body: CompletionBody, model: str, arrival_s: float
) -> _Call:
    text_options = await _compile_text_options(state, body)
    texts, prompts = await _encode_prompts(state, body)
    context_length = state.model.context_length
    if state.config.allow_auto_truncate:
        context_length = min(context_length, state.client.info["max_request_tokens"])
        room = context_length - (body.max_tokens or 1)
        prompts = [prompt[: max(1, room)] for prompt in prompts]
    if len(prompts) * (body.n or 1) > MAX_TOTAL_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n = {body.n or 1} are more than {MAX_TOTAL_CHOICES} "
            "choices; send several requests",
            param="prompt",
        )
    limits = [
        Limits(
            temperature=default_temperature(state, body.temperature),
            top_p=default_top_p(state, body.top_p),
            seed=body.seed,
            max_new_tokens=fit_context(
                len(prompt),
                body.max_tokens,
                default=DEFAULT_MAX_TOKENS,
                context_length=context_length,
            ),
        )
        for prompt in prompts
    ]
    urgency = urgency_of(state, request, body, arrival_s=arrival_s)
    requests = build_requests(state, body, prompts, limits, arrival_s=arrival_s, urgency=urgency)
    frame = build_frame(
        request, body, prefix="cmpl-", model=model, fingerprint=state.model.fingerprint
    )
    if body.echo and not texts:
        texts = [
            state.codec.decode(prompt, skip_special_tokens=body.skip_special_tokens is not False)
            for prompt in prompts
        ]
    return _Call(
        state=state,
        body=body,
        frame=frame,
        texts=texts,
        prompts=prompts,
        generation=Generation(state, requests, names=frame.names, text=text_options),
    )


async def _compile_text_options(state: ServerState, body: CompletionBody) -> StreamOptions:
    """Compile once what all choices share; classes of a pattern may take a millisecond each."""
    options = TextOptions(
        stop=body.stop_strings(),
        stop_regex=body.stop_patterns(),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=body.keeps_stop(),
    )
    size = INLINE_TEXT_LENGTH if options.stop_regex else sum(map(len, options.stop))
    return await state.in_thread(options.compile, size=size)


async def _encode_prompts(
    state: ServerState, body: CompletionBody
) -> tuple[list[str], list[list[int]]]:
    """Return the prompts as texts (if they came as such) and as token ids."""
    given = body.prompt
    if not given and not isinstance(given, str):
        raise InvalidRequest("'prompt' is empty", param="prompt", code="empty_prompt")
    texts = [given] if isinstance(given, str) else [part for part in given if isinstance(part, str)]
    if not state.config.allow_auto_truncate:
        for text in texts:
            check_text_len(state, len(text), param="prompt")
    if texts:
        prompts = await state.in_thread(
            state.codec.encode_batch,
            texts,
            add_special_tokens=body.add_special_tokens is not False,
            size=sum(map(len, texts)),
        )
    else:
        prompts = [part for part in given if isinstance(part, list)]
        if not prompts:
            prompts = [[part for part in given if isinstance(part, int)]]
    if not all(prompts):
        raise InvalidRequest(
            "'prompt' has no tokens; give at least one", param="prompt", code="empty_prompt"
        )
    return texts, prompts


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One completion call, ready to run as an answer or as a stream."""

    state: ServerState
    body: CompletionBody
    frame: Frame
    texts: list[str]
    prompts: list[list[int]]
    generation: Generation

    async def answer(self) -> dict[str, Any]:
        """Run all choices and return the whole answer."""
        async with self.generation:
            choices = self.generation.choices
            objects = await run_all(
                [self._complete(index, choice) for index, choice in enumerate(choices)]
            )
            return self.frame.wrap(_KIND, objects) | {"usage": self._usage(choices)}

    async def stream(self, buffer: EventBuffer) -> None:
        """Run all choices and push their chunks."""
        choices = self.generation.choices
        try:
            await run_all(
                [self._stream(index, choice, buffer) for index, choice in enumerate(choices)]
            )
            if self._has_usage_chunk:
                chunk = self.frame.wrap(_KIND, []) | {"usage": self._usage(choices)}
                await buffer.push(event(chunk))
        finally:
            self.generation.close()

    async def _complete(self, index: int, choice: Choice) -> dict[str, Any]:
        text = TextChoice(choice, self.body)
        pieces = [self._echo(index)]
        async for delta in choice:
            piece, _ = await text.push(delta)
            pieces.append(piece)
        token_ids = text.token_ids if self.body.return_token_ids else None
        value = choice_object(index, "".join(pieces), text, token_ids=token_ids)
        return value | self._prompt_ids(index)

    async def _stream(self, index: int, choice: Choice, buffer: EventBuffer) -> None:
        text = TextChoice(choice, self.body)
        pending, ids, is_first = self._echo(index), [], True
        num_pending = self.state.config.stream_interval  # the first token goes out at once
        async for delta in choice:
            piece, fresh = await text.push(delta)
            pending += piece
            ids += fresh
            num_pending += len(fresh)
            is_due = num_pending >= self.state.config.stream_interval and (
                pending or self.body.return_token_ids
            )
            if not is_due and text.finish_reason is None:
                continue
            token_ids = ids if self.body.return_token_ids else None
            value = choice_object(index, pending, text, token_ids=token_ids)
            if is_first:
                value |= self._prompt_ids(index)
            await buffer.push(event(self._chunk(value, choice)))
            pending, ids, is_first, num_pending = "", [], False, 0

    def _chunk(self, value: dict[str, Any], choice: Choice) -> dict[str, Any]:
        chunk = self.frame.wrap(_KIND, [value])
        if self.body.has_continuous_usage():
            chunk["usage"] = usage([choice.counts])
        elif value["finish_reason"] is not None and self._has_usage_in_last:
            chunk["usage"] = self._usage(self.generation.choices)
        elif self._has_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _usage(self, choices: list[Choice]) -> dict[str, Any]:
        counts = [choice.counts for choice in choices]
        return usage(counts, num_prompts=len(self.prompts))

    @property
    def _has_usage_chunk(self) -> bool:
        return self.body.includes_usage() and not self._has_usage_in_last

    @property
    def _has_usage_in_last(self) -> bool:
        return self.state.config.api_profile == "deepseek"

    def _echo(self, index: int) -> str:
        return self.texts[index // (self.body.n or 1)] if self.body.echo else ""

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.prompts[index // (self.body.n or 1)]}
