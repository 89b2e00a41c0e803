"""Tokenizers that lack control tokens of the encoding: plain text, one warning, still served."""

import logging
from pathlib import Path

import pytest

from dsserve import _native
from dsserve.chat.recipe import ChatConverter
from dsserve.chat.settings import ChatSettings
from dsserve.errors import ConfigError
from dsserve.protocol.engine import FinishCode, pack_u32
from text_helpers import DSML, THINKING_OFF, TOOLS, body, converter, text_of, tokenizer_path


def settings(path: Path) -> ChatSettings:
    return ChatSettings(served_names=("tiny",), tokenizer_path=path, context_length=4096)


@pytest.fixture
def lacking(tmp_path: Path) -> Path:
    """A tokenizer without the tokens that the golden checkpoints lack."""
    text = (tokenizer_path() / "tokenizer.json").read_text(encoding="utf-8")
    system = "<｜System｜>"  # noqa: RUF001 - the released spelling
    for spelling in (system, DSML):
        assert text.count(f'"content": "{spelling}"') == 1
        text = text.replace(f'"content": "{spelling}"', f'"content": "other {spelling}"')
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_missing_tokens_are_warned_about_once_and_encoded_as_text(
    lacking: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        chat = ChatConverter(settings(lacking))
        ids = chat.prompt_ids(body())
        chat.prompt_ids(body())
    (message,) = caplog.messages
    assert "System" in message
    assert DSML in message
    native = _native.Tokenizer(lacking)
    assert native.decode(pack_u32(ids), skip_special=False) == text_of(
        converter().prompt_ids(body())
    )
    assert len(ids) > len(converter().prompt_ids(body()))


def test_replies_of_a_lacking_tokenizer_keep_the_markup_as_content(lacking: Path) -> None:
    job = ChatConverter(settings(lacking)).convert(body(tools=TOOLS) | THINKING_OFF)
    stream = job.open_stream(0)
    native = _native.Tokenizer(lacking)
    (packed,) = native.encode_batch([f"<{DSML} calls>"])
    ids = [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]
    deltas = stream.push(ids, FinishCode.LENGTH)
    assert deltas == [{"content": f"<{DSML} calls>"}]


def test_complete_tokenizer_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ChatConverter(settings(tokenizer_path()))
    assert caplog.messages == []


@pytest.mark.parametrize("content", [None, "{", '{"model": 1}'])
def test_unusable_tokenizer_stops_the_server(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ChatConverter(settings(path))
