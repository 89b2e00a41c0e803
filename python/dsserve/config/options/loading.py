"""Launch flags of the group "Model and loading"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsserve.config.flag import LATER, Kind, option, switch


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Which model is served and how it is read."""

    model_path: str | None = option(
        None,
        "Folder of the checkpoint (config.json, *.safetensors, tokenizer.json).",
        since=1,
        aliases=("--model",),
        default_text="the embedded model",
    )
    tokenizer_path: str | None = option(
        None, "Folder or file of the tokenizer.", since=1, default_text="model path"
    )
    served_model_name: str | None = option(
        None,
        "Name of the model in the API.",
        since=1,
        default_text="last part of the model path",
    )
    revision: str | None = option(None, "Revision of the checkpoint to fetch.", since=LATER)
    load_format: str = option(
        "auto",
        "How weights come to be: read (auto, safetensors), random (dummy), or none at all (fake).",
        since=1,
        choices={"auto": 1, "safetensors": 1, "dummy": 1, "fake": 1},
    )
    trust_remote_code: bool = switch(
        "Accepted for compatibility; no remote code is ever run.",
        since=1,
        notice="--trust-remote-code has no effect: dsserve never runs code of a checkpoint",
    )
    context_length: int | None = option(
        None,
        "Longest prompt plus output, in tokens.",
        since=1,
        kind=Kind.INT,
        minimum=1,
        default_text="from the checkpoint",
    )
    dtype: str = option(
        "auto",
        "Type of the activations; auto is bfloat16, the type of the released model.",
        since=1,
        choices={
            "auto": 1,
            "bfloat16": 1,
            "half": LATER,
            "float16": LATER,
            "float": LATER,
            "float32": LATER,
        },
    )
    quantization: str | None = option(
        None,
        "Weight format, which must be the checkpoint's own.",
        since=1,
        choices={"fp8": 1},
        default_text="from the checkpoint",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Layout of the KV cache; auto is the FP8 row layout of the model.",
        since=6,
        choices={"auto": 1},
    )
    json_model_override_args: dict[str, Any] = option(
        {}, "Values that replace those of config.json, as a JSON object.", since=1, kind=Kind.JSON
    )
    weight_loader_prefetch_num_threads: int = option(
        4, "Threads that read weight files ahead.", since=6, kind=Kind.INT, minimum=1
    )
