"""What the chat layer must know about the server and its model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ApiProfile = Literal["open", "deepseek"]
ModelVersionName = Literal["v4.1", "v4"]


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Values for what a client leaves unset in the `open` profile.

    They come from the checkpoint's `generation_config.json` (`--sampling-defaults model`); None
    means 1.0, as the recipe resolves it.
    """

    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Constants of the chat layer, fixed when the server starts.

    Attributes:
        served_names: Model names that requests may use; the first one is the default.
        tokenizer_path: A `tokenizer.json`, or the directory that holds one.
        context_length: Tokens that prompt and output share.
        api_profile: `open` lets the client's values win, `deepseek` does what the hosted API does.
        model_version: Which prompt encoding renders the conversation.
        default_chat_template_kwargs: Server-wide `chat_template_kwargs`; a request's own win.
        sampling_defaults: See `SamplingDefaults`; used by the `open` profile only.
    """

    served_names: tuple[str, ...]
    tokenizer_path: Path
    context_length: int
    api_profile: ApiProfile = "open"
    model_version: ModelVersionName = "v4.1"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling_defaults: SamplingDefaults = SamplingDefaults()
