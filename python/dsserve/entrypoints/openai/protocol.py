"""Bodies of the OpenAI endpoints: types and ranges. What a field means is decided where it is used.

Unknown fields are kept and ignored, as deepseek-recipe does; known ones that do not work are refused
in `fields.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024

MAX_STOP_PATTERN_LENGTH = 1024
StopPattern = Annotated[str, Field(min_length=1, max_length=MAX_STOP_PATTERN_LENGTH)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
# The first wrong element ends the check: a prompt may have a million of them.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculativeOptions(BaseModel):
    """`speculative`: how many tokens are drafted for this request. Drafts never change what is output."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool = True
    draft_len: int | None = Field(None, ge=0, description="Draft tokens of a step, at most.")


class GenerationBody(BaseModel):
    """Fields that chat completions and completions share."""

    # Integers pass for floats, and nothing else for anything else.
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(None, description="A served name; the server's model if left out.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="-1 and 0: the whole vocabulary."
    )
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, description="Token id to -100..100.")
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)

    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=256)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = True

    rid: str | None = Field(None, min_length=1, max_length=256)
    request_id: str | None = Field(None, min_length=1, max_length=256)
    cache_salt: str | None = Field(None, max_length=1024)
    extra_key: str | None = Field(None, max_length=1024)
    return_token_ids: bool | None = False
    speculative: SpeculativeOptions | None = None
    custom_params: dict[str, Any] | None = None

    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Urgency, with --enable-priority-scheduling."
    )
    timeout_ms: int | None = Field(
        None, ge=1, le=7 * 24 * 3600 * 1000, description="Time after which the call ends."
    )
    user: str | None = Field(None, max_length=1024, description="Whom the call is for.")

    @field_validator("stop", mode="wrap")
    @classmethod
    def _check_stop(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        stop = _or_one_message(
            value,
            handler,
            f"must be a text of 1 to {MAX_STOP_LENGTH} characters or a list of such texts",
        )
        if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, not {len(stop)}")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _limit_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for value in (bias or {}).values():
            if not -100 <= value <= 100:
                raise ValueError(f"a bias must be within -100 and 100, not {value:g}")
        return bias

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' needs 'stream': true")
        return self

    def stop_strings(self) -> list[str]:
        """Return the stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def keeps_stop(self) -> bool:
        """Tell whether what ended the output stays in it."""
        return bool(self.include_stop_str_in_output) or bool(self.no_stop_trim)

    def client_id(self) -> str | None:
        """Return the id that the client chose, under either name."""
        return self.rid if self.rid is not None else self.request_id

    def includes_usage(self) -> bool:
        """Tell whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def has_continuous_usage(self) -> bool:
        """Tell whether every chunk of a stream carries usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        description="A text, token ids, or a list of either."
    )
    echo: bool | None = False
    add_special_tokens: bool | None = True
    stop_regex: StopPattern | list[StopPattern] | None = Field(
        None, description="Patterns that stop the text where a match is complete."
    )

    @field_validator("stop_regex", mode="wrap")
    @classmethod
    def _check_stop_regex(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        patterns = _or_one_message(
            value,
            handler,
            f"must be a pattern of 1 to {MAX_STOP_PATTERN_LENGTH} characters or a list of such "
            "patterns",
        )
        if isinstance(patterns, list) and len(patterns) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop patterns, not {len(patterns)}")
        return patterns

    def stop_patterns(self) -> list[str]:
        """Return the stop patterns as a list."""
        if self.stop_regex is None:
            return []
        return [self.stop_regex] if isinstance(self.stop_regex, str) else list(self.stop_regex)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _check_prompt(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return _or_one_message(
            value,
            handler,
            "must be a text, a list of texts, a list of token ids, or a list of such lists",
        )


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`; the conversation itself is checked by the chat layer."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = None


def _or_one_message(value: Any, handler: ValidatorFunctionWrapHandler, message: str) -> Any:
    """Check a union: one sentence says more than what each member of it has to say."""
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(message) from None
