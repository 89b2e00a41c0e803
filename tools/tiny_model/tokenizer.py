"""Trains the tokenizer on the training data and general English, with the control spellings cut out."""

from __future__ import annotations

import argparse
import importlib.resources
import re
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from deepseek_recipe import DeepseekV41Encoding
from tools.tiny_model.config import VOCAB_SIZE
from tools.tiny_model.data.lexicon import common_words
from tools.tiny_model.data.mix import Mixture
from tools.tiny_model.render import Renderer, Settings, draw_system, reply_text

from dsserve.debug.tokenizer_builder import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPELLING = re.compile("<｜[^｜]*｜>|</?think>|｜DSML｜")  # noqa: RUF001 - DeepSeek's bar
_NUM_EXAMPLES = 4000
_ROW_LENGTH = 320


def corpus(seed: int) -> str:
    """Rendered training examples without control spellings, the word list and the shipped English text."""
    mixture = Mixture(seed, row_length=_ROW_LENGTH)
    rng = Random(seed)
    encoding = DeepseekV41Encoding()
    render = Renderer.conversation
    parts: list[str] = []
    for _ in range(_NUM_EXAMPLES):
        example = mixture.example()
        if example.raw is not None:
            parts.append(example.raw)
            continue
        thinking, effort = rng.random() < 0.5, rng.choice((None, "low", "max"))
        settings = Settings(thinking, effort, draw_system(example, rng))
        prompt = encoding.render_conversation(render(example, settings)).prompt
        parts.append(prompt + reply_text(example, thinking=thinking, effort=effort))
    english = (importlib.resources.files("dsserve") / "assets" / "corpus.txt").read_text(
        encoding="utf-8"
    )
    text = "\n".join(_SPELLING.sub("\n", part) for part in parts)
    return "\n".join((text, english, english, english, *(f" {word}" for word in common_words())))


def main(argv: Sequence[str] | None = None) -> int:
    """Write `tokenizer.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    tokenizer = build_tokenizer(VOCAB_SIZE, text=corpus(options.seed))
    options.out.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
