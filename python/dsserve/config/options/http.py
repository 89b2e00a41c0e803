"""Launch flags of the group "Server"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsserve.config.flag import Kind, option, switch


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """The HTTP server, its keys and limits, and how requests become prompts and text."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface.", since=1)
    port: int = option(
        30000, "Port to listen on.", since=1, kind=Kind.INT, minimum=1, maximum=65535
    )
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send; may be repeated.", since=1, is_repeated=True
    )
    api_key_file: str | None = option(None, "File with one API key a line.", since=5)
    max_concurrent_per_key: int | None = option(
        None, "Requests that one API key may have open.", since=5, kind=Kind.INT, minimum=1
    )
    admin_api_key: str | None = option(None, "Key of the admin endpoints.", since=1)
    api_profile: str = option(
        "open",
        "open: what the client sent wins; deepseek: as the hosted API behaves.",
        since=1,
        choices={"open": 1, "deepseek": 1},
    )
    ssl_certfile: str | None = option(None, "Certificate file for HTTPS.", since=5)
    ssl_keyfile: str | None = option(None, "Key file for HTTPS.", since=5)
    config: str | None = option(
        None, "YAML file with flags as keys; flags and variables beat it.", since=1
    )
    skip_server_warmup: bool = switch("Do not run a first request before being ready.", since=1)
    shutdown_grace_period: float = option(
        180.0,
        "Seconds that running requests may go on after SIGTERM.",
        since=1,
        kind=Kind.FLOAT,
        minimum=0,
        default_text="180",
    )
    max_payload_size: int = option(
        64 * 1024 * 1024,
        "Largest request body, e.g. 64MiB.",
        since=1,
        kind=Kind.SIZE,
        minimum=1024,
        default_text="64MiB",
    )
    tokenizer_worker_num: int = option(
        2, "Threads that encode prompts.", since=1, kind=Kind.INT, minimum=1, maximum=256
    )
    tokenizer_backend: str = option(
        "auto",
        "Which encoder is used: huggingface is the reference, fastokens the fast one (same ids); auto "
        "takes the fast one where it knows the tokenizer's split pattern.",
        since=1,
        choices={"auto": 1, "huggingface": 1, "fastokens": 3},
    )
    stream_interval: int = option(
        1, "Tokens between two pieces of a stream.", since=1, kind=Kind.INT, minimum=1
    )
    reasoning_parser: str = option(
        "auto",
        "Format of the reasoning part; auto follows the model.",
        since=1,
        choices={"auto": 1, "deepseek-v41": 1, "deepseek-v4": 1},
    )
    tool_call_parser: str = option(
        "auto",
        "Format of tool calls; auto follows the model.",
        since=1,
        choices={"auto": 1, "deepseekv41": 1, "deepseekv4": 1},
    )
    tool_grammar: str = option(
        "shape",
        "How far tool calls are constrained.",
        since=5,
        choices={"off": 5, "shape": 5, "strict": 5},
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {},
        "Values used where a chat request has no chat_template_kwargs of its own, as a JSON object.",
        since=1,
        kind=Kind.JSON,
        default_text="none",
    )
    sampling_defaults: str = option(
        "model",
        "Where unset sampling values come from: generation_config.json (model) or 1.0 (openai).",
        since=1,
        choices={"model": 1, "openai": 1},
    )
    enable_cache_report: bool = switch(
        "Accepted for compatibility; cached tokens are always reported.",
        since=1,
        default=True,
        notice="--enable-cache-report has no effect: cached tokens are always reported",
    )
    grammar_backend: str = option(
        "xgrammar",
        "Engine of constrained output.",
        since=5,
        choices={"xgrammar": 5, "llguidance": 5, "none": 5},
    )
    enable_response_store: bool = switch("Keep responses of /v1/responses in memory.", since=5)
    stream_response_default_include_usage: bool = switch(
        "Send the usage chunk in every stream.", since=5
    )
    client_stall_timeout: float = option(
        300.0,
        "Seconds after which a client that reads nothing is cut off.",
        since=5,
        kind=Kind.FLOAT,
        minimum=0,
        default_text="300",
    )
    disable_ui: bool = switch("Do not serve the page /ui.", since=5)
