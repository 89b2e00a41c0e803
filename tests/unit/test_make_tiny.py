"""`dsserve debug make-tiny`: complete, deterministic, atomic, and a tokenizer that fits the model."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepseek_recipe import (
    Conversation,
    DeepseekV41Encoding,
    SpecialToken,
    SystemMessage,
    UserMessage,
)
from deepseek_recipe import Tokenizer as RecipeTokenizer
from tokenizers import Tokenizer

from dsserve.config.model import load_model_config
from dsserve.debug import make_tiny as module
from dsserve.debug.make_tiny import main, make_tiny
from dsserve.debug.tokenizer_builder import build_tokenizer
from dsserve.engram.hashing import build_engram_constants, load_token_map
from dsserve.errors import ConfigError
from dsserve.models.deepseek_v4.random_weights import draw_values
from dsserve.models.deepseek_v4.weight_codes import decode_fp4, decode_fp8
from dsserve.models.deepseek_v4.weights import load_checkpoint
from dsserve.models.presets import PRESET_NAMES

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("make") / "tiny"
    assert main(["--out", str(folder), "--seed", "3"]) == 0
    return folder


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_every_preset_loads_strictly(tmp_path: Path, preset: str) -> None:
    make_tiny(tmp_path / preset, seed=1, preset=preset)
    config = load_model_config(tmp_path / preset)
    weights = load_checkpoint(tmp_path / preset, config, draft=True)
    assert all(tensor.float().isfinite().all() for tensor in weights.values())


def test_tiny_has_the_size_of_its_recipe(tiny: Path) -> None:
    assert {file.name for file in tiny.iterdir()} == FILES
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    assert round(index["metadata"]["total_size"] / 1e6, 2) == 15.82
    assert sum(file.stat().st_size for file in tiny.iterdir()) <= 16 * 2**20


def test_same_seed_gives_the_same_files_in_another_process(tiny: Path, tmp_path: Path) -> None:

    arguments = ["--out", str(tmp_path / "again"), "--seed", "3"]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-m", module.__name__, *arguments], check=True, env=environment)
    assert digests(tmp_path / "again") == digests(tiny)


def test_another_seed_changes_the_weights_only(tiny: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "other", seed=4)
    first, second = digests(tiny), digests(tmp_path / "other")
    assert {name for name in FILES if first[name] != second[name]} == {"model.safetensors"}


def test_directory_with_content_is_refused_without_force(tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty; add --force"):
        make_tiny(tmp_path, preset="golden-g")
    assert [file.name for file in tmp_path.iterdir()] == ["keep.txt"]
    assert main(["--out", str(tmp_path), "--preset", "golden-g"]) == 2


def test_force_replaces_the_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("old")
    make_tiny(out, preset="golden-g", force=True)
    assert {file.name for file in out.iterdir()} == FILES
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_empty_directory_is_used(tmp_path: Path) -> None:
    make_tiny(tmp_path / "a" / "b", preset="golden-g")
    (tmp_path / "empty").mkdir()
    make_tiny(tmp_path / "empty", preset="golden-g")
    assert digests(tmp_path / "a" / "b") == digests(tmp_path / "empty")


def test_file_as_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == 2
    assert "is a file; name a directory" in capsys.readouterr().err


def test_failure_leaves_nothing_and_keeps_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_safetensors", full)
    with pytest.raises(ConfigError, match="No space left"):
        make_tiny(out, preset="golden-g", force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (out / "old.txt").read_text() == "old"


def test_old_directory_is_back_if_the_new_one_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("old")
    rename = Path.rename

    def refuse_new(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise OSError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(ConfigError, match="Permission denied"):
        make_tiny(out, preset="golden-g", force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (out / "old.txt").read_text() == "old"


def test_unknown_preset_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny, golden-a, golden-g"):
        make_tiny(tmp_path / "x", preset="huge")
    assert list(tmp_path.iterdir()) == []


def test_quantised_weights_decode_to_the_drawn_values(tiny: Path) -> None:
    config = load_model_config(tiny)
    weights = load_checkpoint(tiny, config)

    def drawn(name: str, shape: tuple[int, int]) -> torch.Tensor:
        return draw_values(f"{name}.weight", shape, config, seed=3)

    def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
        return bool((actual - expected).norm() < tolerance * expected.norm())

    for name in ("layers.3.attn.wo_b", "layers.1.engram.embed", "layers.2.engram.wkv"):
        codes, scale = weights[f"{name}.weight"], weights[f"{name}.scale"]
        expected = drawn(name, (codes.shape[0], codes.shape[1]))
        assert close(decode_fp8(codes, scale), expected, 0.04), name
    name = "layers.5.ffn.experts.7.w2"
    packed, scale = weights[f"{name}.weight"], weights[f"{name}.scale"]
    expected = drawn(name, (packed.shape[0], 2 * packed.shape[1]))
    assert close(decode_fp4(packed, scale), expected, 0.15)


def test_weights_have_a_sane_scale(tiny: Path) -> None:
    config = load_model_config(tiny)
    weights = load_checkpoint(tiny, config)
    wq = decode_fp8(weights["layers.0.attn.wq_a.weight"], weights["layers.0.attn.wq_a.scale"])
    assert wq.std().item() == pytest.approx(config.hidden_size**-0.5, rel=0.05)
    head = weights["head.weight"].float()
    logits = head @ torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert 3.0 < logits.std() < 5.0
    assert logits[[0, 1, 2]].tolist() == [0.0, 0.0, 0.0]
    mixing = weights["layers.0.hc_attn_base"][8:].view(4, 4)
    assert (mixing.diagonal() - mixing.sum(1) / 4 > 1.5).all()


def test_configuration_fits_the_tokenizer(tiny: Path) -> None:
    config = load_model_config(tiny)
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size == 2048
    assert [tokenizer.id_to_token(i) for i in (0, 1)] == [
        SpecialToken.Bos.default_str(),
        SpecialToken.Eos.default_str(),
    ]
    assert tokenizer.token_to_id(SpecialToken.Image.default_str()) == config.image_token_id
    constants = build_engram_constants(
        config, load_token_map(tiny / "tokenizer.json", config.vocab_size)
    )
    assert constants.primes.sum(axis=(1, 2)).tolist() == [6126, 6332]


@pytest.mark.parametrize("token", [t for t in dir(SpecialToken) if t[0].isupper()])
def test_every_special_token_of_the_recipe_is_one_id(tiny: Path, token: str) -> None:
    text = getattr(SpecialToken, token).default_str()
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    encoded = tokenizer.encode(f"a {text} b", add_special_tokens=False).tokens
    assert text in encoded


@pytest.mark.parametrize(
    "text",
    [
        "The river runs behind the house.\n",
        "def f(x):\n    return x + 1\n",
        "你好,世界 こんにちは",
        "naïve café \U0001f600 \u0000 \u200d",
        "<think>no</think>",
    ],
)
def test_tokenizer_loses_nothing(tiny: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_numbers_are_single_digits(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.encode("20489", add_special_tokens=False).tokens == list("20489")


def test_recipe_encodes_control_tokens_as_ids_and_messages_as_text(tiny: Path) -> None:
    file = str(tiny / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    encoding = DeepseekV41Encoding().with_tokenizer(RecipeTokenizer.from_file(file))
    conversation = Conversation([SystemMessage("Be brief."), UserMessage("Say <think> 12 times.")])
    ids = encoding.encode(conversation)
    rendered = encoding.render_conversation(conversation)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered.prompt
    control = [rendered.prompt[start:end] for start, end in rendered.special_ranges]
    assert rendered.prompt.count("<think>") == 2
    assert control.count("<think>") == 1
    for text in set(control):
        assert ids.count(tokenizer.token_to_id(text)) == control.count(text), text


@pytest.mark.parametrize("size", [200, 100_000])
def test_impossible_vocabulary_size_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        build_tokenizer(size)


def test_english_text_is_compressed() -> None:
    text = "There is a good reason to think that the people of this country want a better life."
    ids = build_tokenizer(2048).encode(text).ids
    assert len(ids) < math.ceil(len(text) / 2.5)
