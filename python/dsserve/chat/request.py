"""The fields of a chat body that deepseek-recipe is to see, in the form it takes them."""

from collections.abc import Mapping
from typing import Any

from dsserve.chat.messages import check_message
from dsserve.errors import InvalidRequest, Unsupported, shown

MAX_OUTPUT_TOKENS = 393216
"""Largest output limit of DeepSeek's API."""

MAX_CHOICES = 128
"""Largest `n`, as in OpenAI's API."""

_NEEDS_GRAMMAR = (
    "regex",
    "ebnf",
    "json_schema",
    "structural_tag",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_OTHERS_NOT_WORKING = ("stop_regex", "task", "functions", "function_call", "audio", "modalities")

_PASSED_ON = ("tools", "tool_choice", "temperature", "top_p", "stop", "stream", "stream_options")


def recipe_body(
    body: Mapping[str, Any], *, model: str, thinking: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body for the recipe: only fields it knows, in its spelling.

    Args:
        body: As the client sent it.
        model: A name registered with the recipe.
        thinking: Result of `reasoning.thinking_fields`.

    Raises:
        InvalidRequest: A field has the wrong type or contradicts another.
        Unsupported: A field that does not work yet.
    """
    _check_working(body)
    mapped: dict[str, Any] = {
        "model": model,
        "messages": _messages(body),
        **thinking,
    }
    for name in _PASSED_ON:
        if body.get(name) is not None:
            mapped[name] = body[name]
    for name in ("max_tokens", "max_completion_tokens"):  # the second one wins
        max_tokens = int_field(body, name, least=1, most=MAX_OUTPUT_TOKENS, default=None)
        if max_tokens is not None:
            mapped["max_tokens"] = max_tokens
    return mapped


def int_field(
    body: Mapping[str, Any], name: str, *, least: int, most: int, default: int | None
) -> int | None:
    """Return an integer field of the body, or `default` where it is missing or null.

    Raises:
        InvalidRequest: It is no integer or outside `least` to `most`.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(
            f"{name} must be an integer from {least} to {most}, not {shown(value)}", param=name
        )
    return value


def bool_field(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a boolean field of the body, or `default` where it is missing or null.

    Raises:
        InvalidRequest: It is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {shown(value)}", param=name)
    return value


def _check_working(body: Mapping[str, Any]) -> None:
    response_format = body.get("response_format")
    if response_format is not None:
        kind = response_format.get("type") if isinstance(response_format, Mapping) else None
        if kind != "text":
            raise Unsupported(
                f"response_format {kind!r} does not work yet; only text does",
                param="response_format",
            )
    for name in _NEEDS_GRAMMAR + _OTHERS_NOT_WORKING:
        if body.get(name) is not None:
            raise Unsupported(f"{name} does not work yet", param=name)


def _messages(body: Mapping[str, Any]) -> list[Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    for index, message in enumerate(messages):
        check_message(message, index)
    mapped = [_message(message) for message in messages]
    continues = bool_field(body, "continue_final_message", default=False)
    adds_turn = bool_field(body, "add_generation_prompt", default=not continues)
    if adds_turn is continues:
        raise InvalidRequest(
            "add_generation_prompt must be the opposite of continue_final_message",
            param="add_generation_prompt",
        )
    if continues:
        last = mapped[-1]
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise InvalidRequest(
                "continue_final_message needs an assistant message at the end",
                param="continue_final_message",
            )
        last["prefix"] = True
    return mapped


def _message(message: object) -> object:
    if not isinstance(message, Mapping):
        return message
    mapped = dict(message)
    if mapped.get("role") == "developer":
        mapped["role"] = "system"
    reasoning = mapped.pop("reasoning", None)
    if reasoning is not None and mapped.get("reasoning_content") is None:
        mapped["reasoning_content"] = reasoning
    return mapped
