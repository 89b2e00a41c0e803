"""What is trained: the configuration of `dsserve-tiny`, from the shipped preset and a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsserve.config.model import ModelConfig, model_config_from_dict
from dsserve.debug.tokenizer_builder import NOISE_TOKEN, image_token, token_id
from dsserve.engram.hashing import EngramConstants, build_engram_constants, build_token_map
from dsserve.models.presets import preset_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 2048
#: Fields that differ from the preset: more index heads, since selection is the weak spot of recall.
CHANGES: dict[str, Any] = {"index_n_heads": 8}


def raw_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The `config.json` of the trained model."""
    token_map = build_token_map(tokenizer, VOCAB_SIZE)
    raw = preset_config(
        "tiny",
        image_token_id=token_id(tokenizer, image_token()),
        noise_token_id=token_id(tokenizer, NOISE_TOKEN),
        compressed_vocab_size=int(token_map.max()) + 1,
    )
    raw["text_config"].update(CHANGES)
    return raw


def model_config(tokenizer: Tokenizer) -> ModelConfig:
    """The same, checked."""
    return model_config_from_dict(raw_config(tokenizer), source="tiny_model")


def engram_constants(config: ModelConfig, tokenizer: Tokenizer) -> EngramConstants:
    """Hash constants that belong to the tokenizer."""
    return build_engram_constants(config, build_token_map(tokenizer, config.vocab_size))
