"""The input of `dsserve debug forward`: what a case may ask for, above all drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsserve.config.model import ModelConfig, load_model_config
from dsserve.debug.forward import Case, read_cases
from dsserve.errors import ConfigError

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
CONFIG = load_model_config(CHECKPOINT)
DRAFTING = {"input_ids": [0, 5], "decode_steps": 3, "capture": ["greedy", "draft"]}


def read(tmp_path: Path, config: ModelConfig = CONFIG, **entry: Any) -> Case:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [entry]}), encoding="utf-8")
    [case] = read_cases(path, config)
    return case


def test_a_case_drafts_by_either_spelling(tmp_path: Path) -> None:
    assert read(tmp_path, **DRAFTING).draft
    assert read(tmp_path, **{**DRAFTING, "draft": True, "capture": ["greedy"]}).draft
    assert not read(tmp_path, **{**DRAFTING, "capture": ["greedy"]}).draft


@pytest.mark.parametrize(
    "change", [{"decode_steps": 0}, {"decode_steps": 1}, {"capture": ["draft"]}]
)
def test_drafts_without_decode_steps_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="case 0: drafts follow decode steps"):
        read(tmp_path, **{**DRAFTING, **change})


@pytest.mark.parametrize("capture", [["greedy", "draft"], ["dspark_main_hidden"]])
def test_drafts_of_a_checkpoint_without_a_head_are_refused(
    tmp_path: Path, capture: list[str]
) -> None:
    config = CONFIG.replace(num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match="DSpark head"):
        read(tmp_path, config, **{**DRAFTING, "capture": capture})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capture": ["wild"]}, "'wild'"),
        ({"mode": "wild"}, "'wild'"),
        ({"wild": 1}, "wild"),
        ({"input_ids": [512]}, "below 512"),
        ({"cached_prefix": 2}, "mode replay"),
        ({"chunk": 0}, "chunk"),
        ({"decode_steps": 600}, "max_position_embeddings"),
    ],
)
def test_a_wrong_case_is_refused_by_number_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match="case 0") as caught:
        read(tmp_path, **{**DRAFTING, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dspark_target_layer_ids": (10, 9)}, "ascending"),
        ({"dspark_target_layer_ids": ()}, "ascending"),
        ({"dspark_target_layer_ids": (9, 12)}, "0..11"),
        ({"dspark_block_size": 0}, "positive"),
    ],
)
def test_an_impossible_draft_head_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(**change)
    CONFIG.replace(**change, num_nextn_predict_layers=0)  # without a head nobody reads them
