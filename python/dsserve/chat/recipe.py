"""A chat body to prompt ids, resolved sampling and one output stream per choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsserve.chat.settings import ChatSettings
from dsserve.chat.stream import ChatStream


@dataclass(frozen=True, kw_only=True)
class ChatJob:
    """A converted chat request; nothing was sent to the engine yet.

    Attributes:
        model: The served name the request used.
        prompt_ids: Prompt, shared by all choices.
        temperature: Resolved as the profile says (thinking mode of `deepseek` overrides the client).
        top_p: Likewise.
        seed: The client's seed or None; choice i of `n` uses `seed + i`.
        max_tokens: Output limit, already lowered to the context that is left.
        stop: Stop strings; the streams match them (answer only), the engine must not.
        n: Number of choices.
        thinking: Whether the reply starts with reasoning.
        stream: The body's `stream`.
        include_usage: Whether a stream ends with a usage chunk of its own
            (`stream_options.include_usage`).
    """

    model: str
    prompt_ids: list[int]
    temperature: float
    top_p: float
    seed: int | None
    max_tokens: int
    stop: tuple[str, ...]
    n: int
    thinking: bool
    stream: bool
    include_usage: bool

    def open_stream(self, index: int) -> ChatStream:
        """Return the stream of choice `index` (0 to n-1)."""
        raise NotImplementedError


class ChatConverter:
    """Converts chat bodies; one per server, usable from several threads."""

    def __init__(self, settings: ChatSettings) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: It cannot be read, or lacks the tokens that end a turn.
        """
        raise NotImplementedError

    def convert(self, body: Mapping[str, Any]) -> ChatJob:
        """Convert the JSON body of `POST /v1/chat/completions`.

        Reads only the fields that shape prompt and parsing; `top_k`, penalties, `logit_bias`,
        `stop_token_ids`, `min_tokens`, `ignore_eos`, `request_id` and the like are the caller's.

        Raises:
            InvalidRequest: A field is missing, of a wrong type or out of range.
            ContextTooLong: The prompt leaves no room for the output asked for.
            Unsupported: A field that does not work yet; `param` names it.
            NotFound: The model name is not served (`InvalidRequest` in the `deepseek` profile).
        """
        raise NotImplementedError

    def prompt_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Return only the prompt ids (`/tokenize` with messages); no limit on the length.

        Raises:
            RequestError: As `convert`.
        """
        raise NotImplementedError
