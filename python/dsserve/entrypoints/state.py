"""What all endpoints of one server share: configuration, engine client, text tools, metrics, live requests."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dsserve.chat.recipe import ChatConverter
from dsserve.chat.settings import ChatSettings, SamplingDefaults
from dsserve.entrypoints.request_log import RequestLog
from dsserve.errors import ConfigError, DsserveError, InvalidRequest, NotFound, NotReady, shown
from dsserve.frontend.detokenize import Detokenizer, TextCodec
from dsserve.frontend.output import system_fingerprint
from dsserve.observe.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from dsserve.config.model import ModelConfig
    from dsserve.config.server import ServerConfig
    from dsserve.frontend.client import EngineClient

Result = TypeVar("Result")

_TINY = math.ulp(0.0)
# Sampling value of `generation_config.json` -> least, most, whether it is a whole number; as in requests.
_DEFAULT_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, False),
    "top_p": (_TINY, 1, False),
    "top_k": (-1, 2**31 - 1, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (_TINY, 2, False),
}

# The ids of answers and the `x-request-id` that the server makes up.
_MADE_UP_NAME = re.compile(r"(?:chatcmpl-|cmpl-)?[0-9a-f]{32}")
# Below this many characters a thread hop costs more than the encoding itself.
INLINE_TEXT_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What endpoints must know about the served model.

    Attributes:
        names: Names that requests may use; the first is the default.
        root: Where the checkpoint comes from.
        context_length: Tokens that prompt and output share.
        vocab_size: Rows of the embedding; ids from clients must be below.
        fingerprint: `system_fingerprint` of every answer.
        defaults: Sampling values for what a client leaves unset, by field name.
    """

    names: tuple[str, ...]
    root: str
    context_length: int
    vocab_size: int
    fingerprint: str
    defaults: dict[str, float]


class LiveRequests:
    """Ids that clients know, and the engine requests behind each."""

    def __init__(self) -> None:
        self._ids: dict[int, tuple[str, ...]] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request_id: int, names: tuple[str, ...]) -> None:
        """Note that `request_id` runs under these names."""
        self._ids[request_id] = names
        self._is_empty.clear()

    def remove(self, request_id: int) -> None:
        """Forget an engine request."""
        self._ids.pop(request_id, None)
        if not self._ids:
            self._is_empty.set()

    async def wait_empty(self) -> None:
        """Wait until no request runs."""
        await self._is_empty.wait()

    def find(self, prefix: str) -> list[int]:
        """Return the engine requests that have a name starting with `prefix`.

        Names that the server made up must be given whole: how they begin is chance, or the same for
        all, so a prefix would hit requests of others.
        """
        return [
            request_id
            for request_id, names in self._ids.items()
            if any(_is_meant(name, prefix) for name in names)
        ]


@dataclass(kw_only=True)
class ServerState:
    """Everything that endpoints share.

    Attributes:
        is_draining: SIGTERM came; new requests are refused, running ones go on.
        is_warm: The first request was answered (or warm-up was skipped).
        last_token_s: `time.monotonic()` of the last token of any request.
    """

    config: ServerConfig
    model: ModelFacts
    client: EngineClient
    codec: TextCodec
    converter: ChatConverter
    metrics: Metrics
    executor: ThreadPoolExecutor
    request_log: RequestLog
    live: LiveRequests = field(default_factory=LiveRequests)
    started_s: float = field(default_factory=time.time)
    is_draining: bool = False
    is_warm: bool = False
    last_token_s: float = 0.0

    @property
    def draft_len(self) -> int:
        """Drafts of a step behind the anchor; 0 without speculation."""
        num_tokens = self.config.speculative_num_draft_tokens
        return 0 if num_tokens is None else num_tokens - 1

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.client.is_ready and self.is_warm and not self.is_draining

    def check_takes_requests(self) -> None:
        """Refuse a request while the server cannot run it.

        Raises:
            DsserveError: `NotReady`, or the loss of the engine.
        """
        if self.client.failure is not None:
            raise self.client.failure
        if self.is_draining:
            raise NotReady("the server is shutting down", code="shutting_down", retry_after_s=5)
        if not self.client.is_ready or not self.is_warm:
            raise NotReady("the server is still loading the model", retry_after_s=5)

    def check_model(self, name: str | None) -> str:
        """Return the served name that a request means.

        Raises:
            NotFound: If no such model is served (`InvalidRequest` in the `deepseek` profile).
        """
        if name is None:
            return self.model.names[0]
        if name in self.model.names:
            return name
        error: type[DsserveError] = (
            InvalidRequest if self.config.api_profile == "deepseek" else NotFound
        )
        raise error(
            f"the model {shown(name)} does not exist; this server has {', '.join(self.model.names)}",
            param="model",
            code="model_not_found",
        )

    async def in_thread(
        self, function: Callable[..., Result], *arguments: Any, size: int, **options: Any
    ) -> Result:
        """Run text work: at once if it is small, else on a thread so that streams go on.

        Args:
            function: Something that releases the interpreter lock for its long part.
            *arguments: Passed on.
            size: Characters or ids it works on.
            **options: Passed on.
        """
        if size < INLINE_TEXT_LENGTH:
            return function(*arguments, **options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, lambda: function(*arguments, **options))


def state_of(request: Request) -> ServerState:
    """Return the state of the server that got `request`."""
    state: ServerState = request.app.state.server
    return state


def build_state(
    config: ServerConfig, model_config: ModelConfig, client: EngineClient
) -> ServerState:
    """Load the tokenizer and build what the endpoints share.

    Args:
        config: Resolved configuration: model path, served name and context length are known.
        model_config: Configuration of the checkpoint.
        client: The engine; it need not be ready.

    Raises:
        ConfigError: If the tokenizer or `generation_config.json` cannot be read.
    """
    if config.model_path is None or config.served_model_name is None:
        raise ConfigError("the configuration is not resolved: no model path or name")
    model_path = Path(config.model_path)
    tokenizer_path = Path(config.tokenizer_path or config.model_path)
    context_length = config.context_length or model_config.max_position_embeddings
    defaults = load_sampling_defaults(model_path) if config.sampling_defaults == "model" else {}
    codec = TextCodec(
        tokenizer_path,
        num_threads=config.tokenizer_worker_num,
        backend=config.tokenizer_backend,
    )
    client.detokenizer = Detokenizer(codec.tokenizer)
    model = ModelFacts(
        names=(config.served_model_name,),
        root=str(model_path),
        context_length=context_length,
        vocab_size=model_config.vocab_size,
        fingerprint=_fingerprint(config, model_path),
        defaults=defaults,
    )
    converter = ChatConverter(
        ChatSettings(
            served_names=model.names,
            tokenizer_path=tokenizer_path,
            context_length=context_length,
            api_profile="deepseek" if config.api_profile == "deepseek" else "open",
            default_chat_template_kwargs=config.default_chat_template_kwargs,
            sampling_defaults=SamplingDefaults(
                temperature=defaults.get("temperature"), top_p=defaults.get("top_p")
            ),
        ),
        codec.tokenizer,
    )
    return ServerState(
        config=config,
        model=model,
        client=client,
        codec=codec,
        converter=converter,
        metrics=Metrics(model_name=config.served_model_name),
        request_log=RequestLog(config, codec),
        executor=ThreadPoolExecutor(config.tokenizer_worker_num, thread_name_prefix="text"),
    )


def load_sampling_defaults(model_path: Path) -> dict[str, float]:
    """Return the sampling values of a checkpoint's `generation_config.json`, if it has one.

    Raises:
        ConfigError: If the file is no JSON object or a value is no number.
    """
    path = model_path / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object")
    if values.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults = {name: values[name] for name in _DEFAULT_RANGES if values.get(name) is not None}
    for name, value in defaults.items():
        least, most, is_whole = _DEFAULT_RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            needed = "a whole number" if is_whole else "a number"
            raise ConfigError(f"{path}: {name} is {value!r}, not {needed}")
        if not least <= value <= most:  # not a number is in no range
            raise ConfigError(
                f"{path}: {name} is {value!r}, which must be from {least:g} to {most:g}; mend the "
                "file or start with --sampling-defaults openai"
            )
    return defaults


def _is_meant(name: str, prefix: str) -> bool:
    return name == prefix or (name.startswith(prefix) and not _MADE_UP_NAME.fullmatch(name))


def _fingerprint(config: ServerConfig, model_path: Path) -> str:
    """Name the weights by the files that hold them; reading them all would take minutes."""
    files = [*sorted(model_path.glob("*.safetensors")), model_path / "config.json"]
    return system_fingerprint(
        {
            "files": [(path.name, path.stat().st_size) for path in files if path.is_file()],
            "numerics": config.numerics,
            "load_format": config.load_format,
            "encoder_replay": config.enable_encoder_swa_bounded_replay,
            "decoder_replay": config.enable_decoder_swa_bounded_replay,
        }
    )
