"""A small tokenizer with DeepSeek's control tokens, and replies of a model written as text."""

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepseek_recipe import SpecialToken

from dsserve.chat.recipe import ChatConverter, ChatJob
from dsserve.chat.settings import ChatSettings, SamplingDefaults
from dsserve.chat.stream import ChatStream
from dsserve.debug.tokenizer_builder import build_tokenizer
from dsserve.frontend.detokenize import TextCodec
from dsserve.protocol.engine import FinishCode

EOS_ID = 1
MODEL = "tiny"
CONTEXT_LENGTH = 4096
DSML = SpecialToken.Dsml.default_str()
THINKING_OFF = {"thinking": {"type": "disabled"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    for name in ("f", "g")
]


@functools.cache
def tokenizer_path() -> Path:
    """Write the tokenizer once per test run."""
    directory = Path(tempfile.mkdtemp(prefix="dsserve-tokenizer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    build_tokenizer(1024).save(str(directory / "tokenizer.json"))
    return directory


@functools.cache
def codec() -> TextCodec:
    return TextCodec(tokenizer_path(), num_threads=2)


def ids_of(text: str) -> list[int]:
    """Encode a reply; spelled control tokens become those tokens."""
    return codec().encode(text, add_special_tokens=False)


def text_of(ids: Sequence[int]) -> str:
    return codec().decode(ids, skip_special_tokens=False)


@functools.cache
def _converter(settings: ChatSettings) -> ChatConverter:
    return ChatConverter(settings)


class _Frozen(dict[str, Any]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def converter(
    *,
    profile: str = "open",
    defaults: SamplingDefaults | None = None,
    template_kwargs: dict[str, Any] | None = None,
    context_length: int = CONTEXT_LENGTH,
    version: str = "v4.1",
) -> ChatConverter:
    return _converter(
        ChatSettings(
            served_names=(MODEL, "alias"),
            tokenizer_path=tokenizer_path(),
            context_length=context_length,
            api_profile=profile,  # type: ignore[arg-type]
            model_version=version,  # type: ignore[arg-type]
            default_chat_template_kwargs=_Frozen(template_kwargs or {}),
            sampling_defaults=defaults or SamplingDefaults(),
        )
    )


def body(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def convert(*, profile: str = "open", **fields: Any) -> ChatJob:
    return converter(profile=profile).convert(body() | fields)


def calls_block(*calls: tuple[str, str], is_open: bool = False) -> str:
    """The markup of calls with one string parameter `x`; without its first line if it is open."""
    invokes = "".join(
        f'<{DSML} invoke name="{name}">\n'
        f'<{DSML} parameter name="x" string="true">{value}</{DSML} parameter>\n'
        f"</{DSML} invoke>\n"
        for name, value in calls
    )
    start = "" if is_open else f"<{DSML} calls>\n"
    return f"{start}{invokes}</{DSML} calls>"


def merge(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put deltas together as a client does."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        assert delta
        for kind in ("content", "reasoning_content"):
            assert delta.get(kind) != ""
            message[kind] += delta.get(kind, "")
        for piece in delta.get("tool_calls", []):
            calls = message["tool_calls"]
            if piece["index"] == len(calls):
                assert piece["id"]
                assert piece["type"] == "function"
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return message


def feed(
    stream: ChatStream, ids: Sequence[int], code: FinishCode, *, piece_len: int = 1
) -> list[dict[str, Any]]:
    """Push ids as the engine sends them, the last ones with the finish code."""
    deltas: list[dict[str, Any]] = []
    for start in range(0, len(ids), piece_len):
        if stream.finished:
            break
        is_last = start + piece_len >= len(ids)
        piece = ids[start : start + piece_len]
        deltas += stream.push(piece, code if is_last else FinishCode.NONE)
    return deltas


def reply(
    job: ChatJob,
    text: str,
    code: FinishCode = FinishCode.STOP_TOKEN,
    *,
    piece_len: int = 1,
) -> tuple[dict[str, Any], ChatStream]:
    """Give the message that a client gets if the model writes `text`."""
    stream = job.open_stream(0)
    ids = ids_of(text) + [EOS_ID] * (code == FinishCode.STOP_TOKEN)
    return merge(feed(stream, ids, code, piece_len=piece_len)), stream
