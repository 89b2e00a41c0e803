"""Overrides of `config.json` that no model can have: each is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsserve.config.model import load_model_config
from dsserve.errors import ConfigError

CHECKPOINT = Path(__file__).resolve().parents[1] / "golden" / "data" / "v41-tiny-a"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"fake": 5}, "fake must be an object, not 5"),
        ({"fake": [1]}, "fake must be an object"),
        ({"architectures": 5}, "architectures must be a list"),
        ({"architectures": [[]]}, "is not supported"),
        ({"quantization_config": 3}, "quantization_config must be an object"),
        ({"quantization_config": {"weight_block_size": 5}}, "weight_block_size"),
        ({"gate_temp": "x"}, "gate_temp must be a number"),
        ({"gate_temp": 0}, "gate_temp = 0.0: must be positive"),
        ({"o_groups": 0}, "o_groups = 0: must be positive"),
        ({"hc_mult": 0}, "hc_mult = 0"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        ({"max_position_embeddings": -5}, "max_position_embeddings = -5"),
        ({"eos_token_id": -1}, "no id below vocab_size"),
        ({"eos_token_id": [1, 10**6]}, "no id below vocab_size"),
        ({"compress_ratios": 3}, "compress_ratios must be a list"),
    ],
)
def test_an_impossible_override_is_refused(overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_model_config(CHECKPOINT, overrides)
