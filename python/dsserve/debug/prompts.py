"""Prompts for tools that let the model answer: from a file of JSON lines, or a built-in set of small tasks."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

from dsserve import _native
from dsserve.chat.recipe import ChatConverter
from dsserve.chat.settings import ChatSettings
from dsserve.errors import ConfigError, DsserveError
from dsserve.protocol.engine import unpack_u32

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dsserve.config.model import ModelConfig

_WORDS = ("apple", "river", "stone", "cloud", "garden", "window", "paper", "silver", "winter", "bread", "music", "tiger")  # fmt: skip
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix")
_COUNTRIES = ("France", "Egypt", "Japan", "Brazil", "Italy", "Kenya", "Norway", "Peru")


def read_prompts(path: Path, model_path: Path, config: ModelConfig) -> list[list[int]]:
    """Token ids of each line of a file.

    Args:
        path: A JSON object a line: a chat body with `messages`, or `prompt` (text), or `input_ids`.
        model_path: Checkpoint folder, for its tokenizer.
        config: The model.

    Raises:
        ConfigError: Naming the file, the line and what is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from None
    prompts = []
    encoder = _Encoder(model_path, config)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(encoder.ids(json.loads(line)))
        except (ValueError, DsserveError) as error:
            raise ConfigError(f"--prompts {path}: line {number}: {error}") from None
    if not prompts:
        raise ConfigError(f"--prompts {path}: no prompts")
    return prompts


def built_in_prompts(model_path: Path, config: ModelConfig, count: int = 192) -> list[list[int]]:
    """Small questions that the embedded model was made for, each a chat of one message."""
    encoder = _Encoder(model_path, config)
    return [
        encoder.ids({"messages": [{"role": "user", "content": text}]}) for text in _questions(count)
    ]


class _Encoder:
    def __init__(self, model_path: Path, config: ModelConfig) -> None:
        tokenizer = model_path / "tokenizer.json"
        self._vocab_size, self._limit = config.vocab_size, config.max_position_embeddings
        self._tokenizer = _native.Tokenizer(tokenizer)
        self._chat = ChatConverter(
            ChatSettings(
                served_names=("model",), tokenizer_path=tokenizer, context_length=self._limit
            ),
            self._tokenizer,
        )

    def ids(self, body: Any) -> list[int]:
        if not isinstance(body, dict):
            raise ConfigError("expected an object")
        if "input_ids" in body:
            ids = body["input_ids"]
            is_list = isinstance(ids, list) and bool(ids)
            if not is_list or not all(type(i) is int and 0 <= i < self._vocab_size for i in ids):
                raise ConfigError(f"input_ids must be ids below {self._vocab_size}")
        elif isinstance(body.get("prompt"), str):
            ids = unpack_u32(self._tokenizer.encode_batch([body["prompt"]])[0])
        elif "messages" in body:
            ids = self._chat.prompt_ids({"model": "model", **body})
        else:
            raise ConfigError("expected messages, prompt or input_ids")
        if not 0 < len(ids) < self._limit:
            raise ConfigError(f"{len(ids)} tokens; a prompt has 1 to {self._limit - 1}")
        return list(ids)


def _questions(count: int) -> Sequence[str]:
    rng = Random(0)

    def words(num: int) -> str:
        return ", ".join(rng.sample(_WORDS, num))

    kinds = (
        lambda: f"What is {rng.randrange(2, 99)} + {rng.randrange(2, 99)}?",
        lambda: f"{rng.randrange(100, 999)} - {rng.randrange(2, 99)}",
        lambda: f"How many words are in this list: {words(rng.randrange(3, 8))}?",
        lambda: f"Put these words in alphabetical order: {words(rng.randrange(3, 7))}",
        lambda: f"Reverse this list: {words(rng.randrange(2, 6))}",
        lambda: f'Say "{words(rng.randrange(2, 7))}"',
        lambda: f"Convert {rng.randrange(2, 30)} years to months.",
        lambda: f"What is the capital of {rng.choice(_COUNTRIES)}?",
        lambda: f"Only yes or no: Is {rng.randrange(2, 999)} even?",
        lambda: f"Write a short story about {rng.choice(_NAMES)} with a {rng.choice(_WORDS)}.",
        lambda: (
            f"{rng.choice(_NAMES)} is {rng.randrange(5, 80)} years old.\n\nWrite this as JSON with keys name, age."
        ),
        lambda: "Who are you?",
    )
    return [kinds[i % len(kinds)]() for i in range(count)]
