"""`/tokenize` and `/detokenize`: what ids a text or a conversation becomes, and back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dsserve.entrypoints.body import body_size, read_object, request_schema, validate
from dsserve.entrypoints.errors import OrjsonResponse
from dsserve.entrypoints.openai.fields import CHAT, refuse_unsupported
from dsserve.entrypoints.openai.protocol import Texts, TokenIds
from dsserve.entrypoints.state import ServerState, state_of
from dsserve.errors import InvalidRequest

router = APIRouter()


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a prompt, or messages as for chat (with `tools` and the like)."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | Texts | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    skip_special_tokens: bool | None = True


@router.post("/tokenize", openapi_extra=request_schema(TokenizeBody))
@router.post("/v1/tokenize", openapi_extra=request_schema(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt, of several, or of a conversation."""
    state = state_of(request)
    raw = await read_object(request)
    body = validate(TokenizeBody, raw)
    model = state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either 'prompt' or 'messages'", param="prompt")
    if body.messages is not None:
        conversation = refuse_unsupported(raw, CHAT) | {"model": model}
        token_ids = await state.in_thread(
            state.converter.prompt_ids, conversation, size=await body_size(request)
        )
        return await _tokens_response(state, body, [token_ids], is_batch=False)
    is_batch = not isinstance(body.prompt, str)
    texts = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt or ())
    batch = await state.in_thread(
        state.codec.encode_batch,
        texts,
        add_special_tokens=body.add_special_tokens is not False,
        size=sum(map(len, texts)),
    )
    return await _tokens_response(state, body, batch, is_batch=is_batch)


@router.post("/detokenize", openapi_extra=request_schema(DetokenizeBody))
@router.post("/v1/detokenize", openapi_extra=request_schema(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    state = state_of(request)
    body = validate(DetokenizeBody, await read_object(request))
    state.check_model(body.model)
    is_batch = bool(body.tokens) and isinstance(body.tokens[0], list)
    batch: list[Any] = list(body.tokens) if is_batch else [body.tokens]
    for token_ids in batch:
        if token_ids and max(token_ids) >= state.model.vocab_size:
            raise InvalidRequest(
                f"'tokens' holds {max(token_ids)}, which is no token id: the vocabulary has "
                f"{state.model.vocab_size}",
                param="tokens",
                code="invalid_token_id",
            )
    texts = [
        await state.in_thread(
            state.codec.decode,
            token_ids,
            skip_special_tokens=body.skip_special_tokens is not False,
            size=len(token_ids),
        )
        for token_ids in batch
    ]
    value = texts if is_batch else texts[0]
    # vLLM calls the field "prompt", SGLang "text".
    return OrjsonResponse({"prompt": value, "text": value})


async def _tokens_response(
    state: ServerState, body: TokenizeBody, batch: list[list[int]], *, is_batch: bool
) -> Response:
    counts = [len(token_ids) for token_ids in batch]
    strings = None
    if body.return_token_strs:
        strings = await state.in_thread(
            lambda: [state.codec.decode_each(token_ids) for token_ids in batch], size=sum(counts)
        )
    return OrjsonResponse(
        {
            "tokens": batch if is_batch else batch[0],
            "count": counts if is_batch else counts[0],
            "max_model_len": state.model.context_length,
            "token_strs": strings if is_batch or strings is None else strings[0],
        }
    )
