"""A chat body to prompt ids, resolved sampling and one output stream per choice."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    ModelVersion,
    ParsingOptions,
    ReasoningContentBehavior,
    StreamProcessor,
)

from dsserve import _native
from dsserve.chat import reasoning, request, tools
from dsserve.chat.guard import recipe_errors
from dsserve.chat.prompt import PromptEncoder
from dsserve.chat.settings import ChatSettings
from dsserve.chat.stream import ChatStream, StreamRules
from dsserve.errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    NotFound,
    RequestError,
    shown,
)

_MODEL_VERSIONS = {
    "v4.1": ModelVersion.DeepseekV41Flash,
    "v4": ModelVersion.DeepseekV4Pro,
}
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class _Parser:
    """What the streams of one request have in common."""

    converted: ConversationRequest
    options: ParsingOptions
    encoder: PromptEncoder
    rules: StreamRules

    def open_stream(self, index: int) -> ChatStream:
        # Names in the recipe's chunks do not matter: only their deltas are used.
        generator = ChatCompletionRequest.chunk_generator(self.converted, "", "")
        processor = StreamProcessor(generator, self.options, self.encoder.recipe_tokenizer)
        return ChatStream(processor, self.rules, index=index)


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
    _parser: _Parser = field(repr=False)

    def open_stream(self, index: int) -> ChatStream:
        """Return the stream of choice `index` (0 to n-1)."""
        return self._parser.open_stream(index)


class ChatConverter:
    """Converts chat bodies; one per server, usable from several threads."""

    def __init__(self, settings: ChatSettings, tokenizer: _native.Tokenizer | None = None) -> None:
        """Load the tokenizer; one that lacks special tokens of the encoding is warned about.

        Args:
            settings: Constants of the server.
            tokenizer: The same file, if the caller has it loaded already.

        Raises:
            ConfigError: The tokenizer cannot be read or is not byte-level, or the template defaults
                are wrong.
        """
        self._settings = settings
        version = _MODEL_VERSIONS[settings.model_version]
        self._encoder = PromptEncoder(settings, tokenizer)
        self._options = (
            ConversionOptions()
            .with_model_versions_by_name(dict.fromkeys(settings.served_names, version))
            .with_reasoning_content_behavior(
                ReasoningContentBehavior.Reject
                if settings.api_profile == "deepseek"
                else ReasoningContentBehavior.FillEmpty
            )
        )
        try:
            reasoning.template_kwargs(
                settings.default_chat_template_kwargs, "default_chat_template_kwargs"
            )
        except RequestError as error:
            raise ConfigError(error.message, param="--default-chat-template-kwargs") from error

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
        model = self._model(body)
        seed = request.int_field(body, "seed", least=0, most=_MAX_SEED, default=None)
        num_choices = request.int_field(body, "n", least=1, most=request.MAX_CHOICES, default=1)
        converted, policy = self._convert(body, model)
        rules, options = self._parsing(body, converted, policy)
        prompt_ids = self._encode(body, converted)
        temperature, top_p = self._sampling(body, converted)
        return ChatJob(
            model=model,
            prompt_ids=prompt_ids,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=self._max_tokens(converted, len(prompt_ids)),
            stop=tuple(options.stop_sequences),
            n=1 if num_choices is None else num_choices,
            thinking=converted.conversation.thinking_mode,
            stream=converted.stream,
            include_usage=_includes_usage(body),
            _parser=_Parser(converted, options, self._encoder, rules),
        )

    def prompt_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Return only the prompt ids (`/tokenize` with messages); no limit on the length.

        Raises:
            RequestError: As `convert`.
        """
        converted, policy = self._convert(body, self._model(body))
        self._parsing(body, converted, policy)
        return self._encode(body, converted)

    def _model(self, body: Mapping[str, Any]) -> str:
        names = self._settings.served_names
        model = body.get("model")
        if model is None:
            return names[0]
        if not isinstance(model, str):
            raise InvalidRequest(f"model must be a string, not {shown(model)}", param="model")
        if model not in names:
            message = f"model {shown(model)} is not served here; known are {', '.join(names)}"
            if self._settings.api_profile == "deepseek":
                raise InvalidRequest(message, param="model", code="model_not_found")
            raise NotFound(message, param="model", code="model_not_found")
        return model

    def _convert(
        self, body: Mapping[str, Any], model: str
    ) -> tuple[ConversationRequest, tools.ToolPolicy]:
        thinking = reasoning.thinking_fields(body, self._settings.default_chat_template_kwargs)
        policy = tools.tool_policy(
            body,
            is_thinking=reasoning.is_thinking(thinking),
            profile=self._settings.api_profile,
        )
        mapped = request.recipe_body(body, model=model, thinking=thinking)
        with recipe_errors(body):
            return ChatCompletionRequest(mapped).convert(self._options), policy

    def _parsing(
        self, body: Mapping[str, Any], converted: ConversationRequest, policy: tools.ToolPolicy
    ) -> tuple[StreamRules, ParsingOptions]:
        options = converted.parsing_options
        # The recipe leaves the markup in the content if `tool_choice` is none.
        options.parse_tool_calls = policy.has_tools
        skips_special = request.bool_field(body, "skip_special_tokens", default=True)
        stage = options.thinking_initial_stage
        rules = StreamRules(
            starts_in_reasoning=stage is not None and stage.starts_in_reasoning(),
            thinking_end_id=self._encoder.thinking_end_id,
            skipped_ids=self._encoder.plain_special_ids if skips_special else frozenset(),
            separate_reasoning=request.bool_field(body, "separate_reasoning", default=True),
            stream_reasoning=request.bool_field(body, "stream_reasoning", default=True),
            drops_calls=policy.drops_calls,
            allows_parallel=policy.allows_parallel,
        )
        return rules, options

    def _encode(self, body: Mapping[str, Any], converted: ConversationRequest) -> list[int]:
        with recipe_errors(body):
            return self._encoder.encode(converted.conversation)

    def _sampling(
        self, body: Mapping[str, Any], converted: ConversationRequest
    ) -> tuple[float, float]:
        resolved = converted.inference_options
        temperature, top_p = resolved.temperature, resolved.top_p
        if self._settings.api_profile == "open":
            defaults = self._settings.sampling_defaults
            temperature = _first(body.get("temperature"), defaults.temperature)
            top_p = _first(body.get("top_p"), defaults.top_p)
        return _first(temperature, 1.0), _first(top_p, 1.0)

    def _max_tokens(self, converted: ConversationRequest, prompt_len: int) -> int:
        context_length = self._settings.context_length
        requested = converted.inference_options.max_tokens
        too_long = f"the prompt has {prompt_len} tokens"
        if requested is not None:
            too_long += f" and {requested} are asked for"
        too_long += f"; the context holds {context_length}"
        if prompt_len >= context_length:
            raise ContextTooLong(too_long, param="messages")
        try:
            return converted.resolve_max_tokens(prompt_len, context_length)
        except ConversionError as error:
            raise ContextTooLong(too_long, param="max_tokens") from error


def _includes_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, Mapping) and options.get("include_usage") is True


def _first(*values: float | None) -> float:
    return next(float(value) for value in (*values, 1.0) if value is not None)
