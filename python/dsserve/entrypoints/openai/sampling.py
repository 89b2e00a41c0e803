"""A checked body to engine requests: sampling values, token ids against the vocabulary, length limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from dsserve.config.determinism import default_seed
from dsserve.errors import ContextTooLong, InvalidRequest, Unsupported, shown
from dsserve.protocol.engine import CustomParams, EngineRequest, SamplingParams, pack_u32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsserve.entrypoints.openai.protocol import GenerationBody
    from dsserve.entrypoints.openai.urgency import Urgency
    from dsserve.entrypoints.state import ServerState

_SEED_MASK = 2**63 - 1
_MAX_ID_DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What differs between the ways to ask for text.

    Attributes:
        temperature: Resolved value; 0 is greedy.
        top_p: Resolved value.
        seed: The client's seed, or None.
        max_new_tokens: Output limit, within the context.
    """

    temperature: float
    top_p: float
    seed: int | None
    max_new_tokens: int


def build_requests(
    state: ServerState,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    limits: Limits | Sequence[Limits],
    *,
    arrival_s: float,
    urgency: Urgency,
) -> list[EngineRequest]:
    """Return `n` engine requests per prompt, those of one prompt next to each other.

    Args:
        state: The server.
        body: The checked body.
        prompts: Token ids of each prompt.
        limits: For all prompts, or one per prompt.
        arrival_s: `time.monotonic()` when the HTTP request came in.
        urgency: Priority, deadline and tenant of them all.

    Raises:
        RequestError: An id is outside the vocabulary, or values contradict each other.
    """
    vocab_size = state.model.vocab_size
    stop_token_ids = pack_u32(_checked_ids(body.stop_token_ids or (), "stop_token_ids", vocab_size))
    logit_bias = _logit_bias(body.logit_bias, vocab_size)
    custom_params = _custom_params(state, body.custom_params)
    draft_len = _draft_len(state, body)
    each = [limits] * len(prompts) if isinstance(limits, Limits) else limits
    requests = []
    for prompt, limit in zip(prompts, each, strict=True):
        token_ids = pack_u32(_checked_ids(prompt, "prompt", vocab_size))
        min_new_tokens = body.min_tokens or 0
        if min_new_tokens > limit.max_new_tokens:
            raise InvalidRequest(
                f"'min_tokens' {min_new_tokens} is above the output limit {limit.max_new_tokens}",
                param="min_tokens",
            )
        requests += [
            EngineRequest(
                request_id=state.client.next_request_id(),
                token_ids=token_ids,
                max_new_tokens=limit.max_new_tokens,
                sampling=_sampling(state, body, limit, index, logit_bias),
                min_new_tokens=min_new_tokens,
                ignore_eos=bool(body.ignore_eos),
                stop_token_ids=stop_token_ids,
                extra_key=body.extra_key,
                cache_salt=body.cache_salt,
                priority=urgency.priority,
                deadline_s=urgency.deadline_s,
                tenant=urgency.tenant,
                arrival_s=arrival_s,
                draft_len=draft_len,
                custom_params=custom_params,
            )
            for index in range(body.n or 1)
        ]
    return requests


def check_text_len(state: ServerState, num_characters: int, *, param: str) -> None:
    """Refuse a text that cannot fit the context however it is encoded, before that takes seconds.

    Raises:
        ContextTooLong: If even the longest tokens would be too many.
    """
    least_tokens = num_characters // state.codec.longest_token
    if least_tokens > state.model.context_length:
        raise ContextTooLong(
            f"this model's context length is {state.model.context_length} tokens, but a text of "
            f"{num_characters} characters has at least {least_tokens}; shorten it",
            param=param,
        )


def fit_context(
    prompt_len: int, max_tokens: int | None, *, default: int, context_length: int
) -> int:
    """Return the output limit of a prompt.

    Args:
        prompt_len: Tokens of the prompt.
        max_tokens: What the client asked for, or None.
        default: What it gets otherwise, if the context has room.
        context_length: Tokens that prompt and output share.

    Raises:
        ContextTooLong: If it does not fit.
    """
    room = context_length - prompt_len
    if max_tokens is None and room >= 1:
        return min(default, room)
    asked = 1 if max_tokens is None else max_tokens
    if asked > room:
        raise ContextTooLong(
            f"this model's context length is {context_length} tokens, but the request needs "
            f"{prompt_len + asked}: {prompt_len} of the prompt and {asked} of the output; shorten "
            "the prompt or lower 'max_tokens'",
            param="prompt" if room < 1 else "max_tokens",
        )
    return asked


def _sampling(
    state: ServerState,
    body: GenerationBody,
    limit: Limits,
    index: int,
    logit_bias: dict[int, float] | None,
) -> SamplingParams:
    defaults = state.model.defaults if state.config.api_profile == "open" else {}
    seed = default_seed(state.config) if limit.seed is None else limit.seed
    top_k = body.top_k if body.top_k is not None else int(defaults.get("top_k", -1))
    return SamplingParams(
        temperature=limit.temperature,
        top_p=limit.top_p,
        top_k=top_k if top_k > 0 else -1,
        min_p=_first(body.min_p, defaults.get("min_p"), 0.0),
        seed=None if seed is None else (seed + index) & _SEED_MASK,
        repetition_penalty=_first(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
        presence_penalty=_first(body.presence_penalty, None, 0.0),
        frequency_penalty=_first(body.frequency_penalty, None, 0.0),
        logit_bias=logit_bias,
    )


def default_temperature(state: ServerState, value: float | None) -> float:
    """Return the client's temperature, else the checkpoint's, else 1."""
    return _first(value, state.model.defaults.get("temperature"), 1.0)


def default_top_p(state: ServerState, value: float | None) -> float:
    """Return the client's top_p, else the checkpoint's, else 1."""
    return _first(value, state.model.defaults.get("top_p"), 1.0)


def _first(given: float | None, default: float | None, otherwise: float) -> float:
    if given is not None:
        return given
    return otherwise if default is None else default


def _checked_ids(token_ids: Sequence[int], param: str, vocab_size: int) -> Sequence[int]:
    """Ids become indices on the device, so none from outside may leave the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"'{param}' holds {max(token_ids)}, which is no token id: the vocabulary has "
            f"{vocab_size}",
            param=param,
            code="invalid_token_id",
        )
    return token_ids


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # `int` refuses thousands of digits with an error of its own.
        is_id = len(key) <= _MAX_ID_DIGITS and key.isascii() and key.isdigit()
        if not is_id or int(key) >= vocab_size:
            raise InvalidRequest(
                f"'logit_bias' names {shown(key)}, which is no token id: the vocabulary has "
                f"{vocab_size}",
                param="logit_bias",
                code="invalid_token_id",
            )
        checked[int(key)] = value
    return checked


def _draft_len(state: ServerState, body: GenerationBody) -> int | None:
    """Draft tokens that the request wants at most; None = what the server gives."""
    options = body.speculative
    if options is None:
        return None
    if not options.enabled:
        return 0
    if options.draft_len is not None and options.draft_len > state.draft_len:
        raise InvalidRequest(
            f"'speculative.draft_len' is {options.draft_len}; this server drafts "
            f"{state.draft_len or 'no'} tokens a step",
            param="speculative.draft_len",
        )
    return options.draft_len


def _custom_params(state: ServerState, params: dict[str, Any] | None) -> dict[str, Any] | None:
    if not params:
        return None
    try:
        checked = msgspec.convert(params, CustomParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"'custom_params': {error}", param="custom_params") from None
    length, most = checked.simulate_accept_len, state.draft_len + 1
    if length is not None and not (most > 1 and 1 <= length <= most):
        limits = f"within 1 and {most}" if most > 1 else "left out: this server drafts no tokens"
        raise InvalidRequest(
            f"'custom_params.simulate_accept_len' is {length}; it must be {limits}",
            param="custom_params.simulate_accept_len",
        )
    script = checked.script
    if script is not None:
        if state.config.load_format != "fake":
            raise Unsupported(
                "'custom_params.script' is for the fake model (--load-format fake)",
                param="custom_params",
            )
        if min(script.ids, default=0) < 0 or min(script.delays_us, default=0) < 0:
            raise InvalidRequest(
                "'custom_params.script' holds a negative number", param="custom_params.script"
            )
        _checked_ids(script.ids, "custom_params.script.ids", state.model.vocab_size)
    return params
