"""The Engram constants and table rows of the golden data follow from tokenizer and configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors import safe_open

from dsserve.config.model import load_model_config
from dsserve.engram.hashing import (
    build_engram_constants,
    hash_rows,
    load_token_map,
    lookback_ids,
    sequence_rows,
)

if TYPE_CHECKING:
    from pathlib import Path


def read_tensors(file: Path, *parts: str) -> dict[str, np.ndarray]:
    with safe_open(file, "np") as data:
        keys = [key for key in data.keys() if any(part in key for part in parts)]  # noqa: SIM118
        return {key: data.get_tensor(key) for key in keys}


def golden_ints(path: Path) -> dict[str, np.ndarray]:
    return read_tensors(path / "golden.safetensors", "engram.", "engram_hash", "input_ids")


@pytest.fixture(params=["golden_a", "golden_geom"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def test_constants_equal_those_of_the_golden_data(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    golden = golden_ints(checkpoint)
    constants = build_engram_constants(
        config, load_token_map(checkpoint / "tokenizer.json", config.vocab_size)
    )
    for name in ("token_map", "multipliers", "primes", "offsets"):
        np.testing.assert_array_equal(getattr(constants, name), golden[f"engram.{name}"])


def test_rows_of_every_prompt_equal_the_golden_rows(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    golden = golden_ints(checkpoint)
    constants = build_engram_constants(
        config, load_token_map(checkpoint / "tokenizer.json", config.vocab_size)
    )
    prompts = [key.removesuffix(".engram_hash") for key in golden if key.endswith(".engram_hash")]
    assert len(prompts) >= 4
    for prompt in prompts:
        rows = sequence_rows(constants, golden[f"{prompt}.input_ids"].tolist())
        np.testing.assert_array_equal(rows, golden[f"{prompt}.engram_hash"], err_msg=prompt)


def test_released_hash_equals_the_golden_block(golden_a: Path) -> None:
    blocks = read_tensors(golden_a / "blocks.safetensors", "engram_real.")
    lookback = lookback_ids(
        blocks["engram_real.compressed_ids"],
        max_ngram_size=4,
        pad_compressed_id=int(blocks["engram_real.pad_compressed_id"][0]),
    )
    for layer in range(2):
        rows = hash_rows(
            lookback,
            multipliers=blocks["engram_real.multipliers"][layer],
            primes=blocks["engram_real.primes"][layer],
            offsets=blocks["engram_real.offsets"][layer],
        )
        np.testing.assert_array_equal(rows, blocks["engram_real.rows"][:, layer])
