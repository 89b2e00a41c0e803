"""The strict loader: every kind of damage is one error that names tensor, file and remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dsserve.config.model import ModelConfig, load_model_config
from dsserve.debug.make_tiny import make_tiny
from dsserve.errors import CheckpointError, ConfigError
from dsserve.models.deepseek_v4 import safetensors_file
from dsserve.models.deepseek_v4.weights import (
    load_checkpoint,
    load_weights,
    random_weights,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GOLDEN_A = Path(__file__).resolve().parents[1] / "golden" / "data" / "v41-tiny-a"
NORM = "layers.0.attn_norm.weight"
SCALE = "layers.0.attn.wq_a.scale"
EXPERT = "layers.0.ffn.experts.0.w1.weight"
TABLE = "layers.1.engram.embed.weight"

Header = dict[str, dict[str, Any]]


def read_raw(file: Path) -> tuple[Header, bytes]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, raw[8 + length :]


def write_raw(file: Path, header: Header | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_tensors(file: Path, header: Header, tensors: dict[str, bytes]) -> None:
    """Write tensors one after another, with types and shapes of `header`."""
    position = 0
    packed: Header = {}
    for name, data in tensors.items():
        packed[name] = header[name] | {"data_offsets": [position, position + len(data)]}
        position += len(data)
    write_raw(file, packed, b"".join(tensors.values()))


def read_tensors(file: Path) -> tuple[Header, dict[str, bytes]]:
    header, data = read_raw(file)
    return header, {n: data[slice(*entry["data_offsets"])] for n, entry in header.items()}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "golden-g"
    make_tiny(folder, seed=7, preset="golden-g")
    return folder


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))


@pytest.fixture
def config(pristine: Path) -> ModelConfig:
    return load_model_config(pristine)


def edit(checkpoint: Path, *, drop: str = "", add: str = "", **changes: dict[str, Any]) -> None:
    """Rewrite the single file with a tensor dropped, added or relabelled; the index follows."""
    header, tensors = read_tensors(checkpoint / SINGLE)
    if drop:
        del tensors[drop]
    if add:
        header[add], tensors[add] = header[NORM], tensors[NORM]
    for name, change in changes.items():
        header[name] = header[name] | change
    write_tensors(checkpoint / SINGLE, header, tensors)
    write_index(checkpoint, dict.fromkeys(tensors, SINGLE))


def write_index(
    checkpoint: Path, weight_map: dict[str, str], total_size: int | None = None
) -> None:
    index: dict[str, Any] = {"weight_map": weight_map}
    if total_size is not None:
        index["metadata"] = {"total_size": total_size}
    (checkpoint / INDEX).write_text(json.dumps(index))


def split(checkpoint: Path) -> tuple[str, str]:
    """Spread the single file over two shards; returns their names."""
    header, tensors = read_tensors(checkpoint / SINGLE)
    names = list(tensors)
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {}
    for shard, part in zip(shards, (names[::2], names[1::2]), strict=True):
        write_tensors(checkpoint / shard, header, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, shard))
    (checkpoint / SINGLE).unlink()
    write_index(checkpoint, weight_map)
    return shards


def failure(checkpoint: Path, config: ModelConfig) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(checkpoint, config)
    return str(caught.value)


def test_golden_checkpoint_loads_bit_for_bit() -> None:
    config = load_model_config(GOLDEN_A)
    weights = load_checkpoint(GOLDEN_A, config, draft=True, vision=True)
    reference = load_file(GOLDEN_A / SINGLE)
    assert set(weights) == {n for n in reference if not n.endswith("bias_vl") or "mtp" not in n}
    for name, tensor in weights.items():
        assert tensor.shape == reference[name].shape
        assert torch.equal(tensor.view(torch.uint8), reference[name].view(torch.uint8)), name


def test_types_in_memory_are_those_of_the_storage(pristine: Path, config: ModelConfig) -> None:
    weights = load_checkpoint(pristine, config)
    assert weights[NORM].dtype is torch.bfloat16
    assert weights["layers.0.hc_attn_fn"].dtype is torch.float32
    assert weights["layers.0.attn.wq_a.weight"].dtype is torch.float8_e4m3fn
    assert weights[SCALE].dtype is torch.uint8
    assert weights[EXPERT].dtype is torch.uint8


def test_skipped_tensors_are_not_returned(pristine: Path, config: ModelConfig) -> None:
    names = set(load_checkpoint(pristine, config))
    assert not any(name.startswith("mtp.") or name.endswith("bias_vl") for name in names)
    assert any(n.startswith("mtp.") for n in load_checkpoint(pristine, config, draft=True))


def test_shards_load_like_a_single_file(
    pristine: Path, checkpoint: Path, config: ModelConfig
) -> None:
    split(checkpoint)
    whole, parts = load_checkpoint(pristine, config), load_checkpoint(checkpoint, config)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), parts[name].view(torch.uint8)), name


def test_single_file_without_index_loads(checkpoint: Path, config: ModelConfig) -> None:
    (checkpoint / INDEX).unlink()
    assert NORM in load_checkpoint(checkpoint, config)


@pytest.mark.parametrize("file_type", ["U8", "F4"])
def test_packed_fp4_may_be_labelled_otherwise(
    checkpoint: Path, config: ModelConfig, file_type: str
) -> None:
    header, _ = read_raw(checkpoint / SINGLE)
    rows, num_bytes = header[EXPERT]["shape"]
    columns = 2 * num_bytes if file_type == "F4" else num_bytes
    edit(checkpoint, **{EXPERT: {"dtype": file_type, "shape": [rows, columns]}})
    assert load_checkpoint(checkpoint, config)[EXPERT].shape == (rows, num_bytes)


def test_copy_is_bounded_and_complete_across_chunks(
    pristine: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_checkpoint(pristine, config)[TABLE]
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 1000)
    sizes = []
    with safetensors_file.SafetensorsFile(pristine / SINGLE) as file:
        destination = np.zeros(whole.nbytes, np.uint8)
        file.copy_into(TABLE, destination, on_chunk=lambda part: sizes.append(len(part)))
        assert destination.tobytes() == whole.view(torch.uint8).numpy().tobytes()
        assert max(sizes) == 1000
        assert sum(sizes) == whole.nbytes
        row = np.zeros(64, np.uint8)
        file.copy_into(TABLE, row, start=5 * 64)
        assert row.tobytes() == whole[5].view(torch.uint8).numpy().tobytes()
        with pytest.raises(CheckpointError, match="past its"):
            file.copy_into(TABLE, row, start=whole.nbytes - 63)


def test_progress_runs_from_nothing_to_everything(pristine: Path, config: ModelConfig) -> None:
    calls: list[tuple[int, int, str]] = []
    weights = load_checkpoint(pristine, config, progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in weights.values())
    assert calls[0] == (0, total, "loading weights")
    assert calls[-1] == (total, total, "loading weights")
    assert [done for done, _, _ in calls] == sorted({done for done, _, _ in calls})
    assert len(calls) <= 110


def test_missing_tensor_is_named(checkpoint: Path, config: ModelConfig) -> None:
    edit(checkpoint, drop=NORM)
    message = failure(checkpoint, config)
    assert f"missing from {INDEX}: {NORM}" in message
    assert "config.json of one checkpoint" in message


def test_missing_tensor_of_a_skipped_part_is_an_error_too(
    checkpoint: Path, config: ModelConfig
) -> None:
    edit(checkpoint, drop="mtp.0.main_norm.weight")
    assert "mtp.0.main_norm.weight" in failure(checkpoint, config)


def test_many_missing_tensors_are_counted(checkpoint: Path, config: ModelConfig) -> None:
    message = failure(checkpoint, config.replace(n_routed_experts=16))
    assert "missing from" in message
    assert "and 236 more (240 in all)" in message
    assert "layers.0.ffn.gate.weight" in message  # its shape is wrong, too


def test_unknown_tensor_is_named(checkpoint: Path, config: ModelConfig) -> None:
    edit(checkpoint, add="layers.0.attn.extra.weight")
    message = failure(checkpoint, config)
    assert "not a tensor of this configuration: layers.0.attn.extra.weight" in message
    assert SINGLE in message


def test_wrong_type_is_named(checkpoint: Path, config: ModelConfig) -> None:
    edit(checkpoint, **{NORM: {"dtype": "F16"}})
    message = failure(checkpoint, config)
    assert f"tensor {NORM} in {SINGLE} has type F16, expected BF16" in message


def test_scale_with_another_type_is_named(checkpoint: Path, config: ModelConfig) -> None:
    edit(checkpoint, **{SCALE: {"dtype": "U8"}})
    assert f"{SCALE} in {SINGLE} has type U8, expected F8_E8M0" in failure(checkpoint, config)


def test_wrong_shape_is_named(checkpoint: Path, config: ModelConfig) -> None:
    edit(checkpoint, **{NORM: {"shape": [64, 2]}})
    message = failure(checkpoint, config)
    assert f"tensor {NORM} in {SINGLE} has shape [64, 2], expected [128]" in message


def test_bytes_that_do_not_fit_the_shape_are_named(checkpoint: Path, config: ModelConfig) -> None:
    header, tensors = read_tensors(checkpoint / SINGLE)
    tensors[NORM] += b"\0\0"
    write_tensors(checkpoint / SINGLE, header, tensors)
    write_index(checkpoint, dict.fromkeys(tensors, SINGLE))
    assert f"tensor {NORM} in {SINGLE} has 258 bytes, its shape needs 256" in failure(
        checkpoint, config
    )


def test_missing_shard_is_named(checkpoint: Path, config: ModelConfig) -> None:
    _, second = split(checkpoint)
    (checkpoint / second).unlink()
    message = failure(checkpoint, config)
    assert second in message
    assert "the file is missing" in message


@pytest.mark.parametrize("keep", [0, 4, 5000, -1])
def test_truncated_file_is_named(checkpoint: Path, config: ModelConfig, keep: int) -> None:
    file = checkpoint / SINGLE
    file.write_bytes(file.read_bytes()[:keep])
    message = failure(checkpoint, config)
    assert f"{file}: truncated" in message
    assert "download the file again" in message


def test_bytes_after_the_last_tensor_are_an_error(checkpoint: Path, config: ModelConfig) -> None:
    with (checkpoint / SINGLE).open("ab") as file:
        file.write(b"more")
    assert "4 bytes after the last tensor" in failure(checkpoint, config)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"\xff\xfe garbage", "the header is no JSON"),
        (b"[1, 2]", "no JSON object"),
        (b"{" * 5000, "the header is no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the header is no JSON"),
        (b'{"a": 1}', "tensor a: bad header entry"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "bad header entry"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', "bad header entry"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "bad header entry"),
        (b'{"a": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}', "bad header entry"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [2, 4]}}', "leaves a gap"),
        (
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}',
            "tensor b overlaps the one before",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
            b' "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
            "names 'a' twice",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [99], "data_offsets": [0, 99]}}',
            "truncated: tensor a ends",
        ),
    ],
)
def test_bad_header_is_an_error_that_names_the_file(
    checkpoint: Path, config: ModelConfig, header: bytes, expected: str
) -> None:
    write_raw(checkpoint / SINGLE, header, b"\0" * 6)
    message = failure(checkpoint, config)
    assert expected in message
    assert str(checkpoint / SINGLE) in message


def test_absurd_header_length_is_no_safetensors_file(checkpoint: Path, config: ModelConfig) -> None:
    (checkpoint / SINGLE).write_bytes(b"\x80\x02}q\x00X\x0a\x00 a pickle, for instance")
    assert "not a safetensors file" in failure(checkpoint, config)


def test_nan_scale_is_a_damaged_file(checkpoint: Path, config: ModelConfig) -> None:
    header, tensors = read_tensors(checkpoint / SINGLE)
    tensors[SCALE] = b"\xff" + tensors[SCALE][1:]
    write_tensors(checkpoint / SINGLE, header, tensors)
    message = failure(checkpoint, config)
    assert f"tensor {SCALE}: a scale is NaN" in message
    assert SINGLE in message


def test_tensor_in_two_shards_is_an_error(checkpoint: Path, config: ModelConfig) -> None:
    first, second = split(checkpoint)
    header, tensors = read_tensors(checkpoint / second)
    other_header, other = read_tensors(checkpoint / first)
    name = next(iter(other))
    write_tensors(
        checkpoint / second, header | {name: other_header[name]}, tensors | {name: other[name]}
    )
    message = failure(checkpoint, config)
    assert f"tensor {name} lies in {first} and in {second}" in message


def test_index_that_names_the_wrong_shard_is_an_error(
    checkpoint: Path, config: ModelConfig
) -> None:
    first, second = split(checkpoint)
    index = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    name = next(n for n, shard in index.items() if shard == first)
    write_index(checkpoint, index | {name: second})
    message = failure(checkpoint, config)
    assert f"tensor {name} should be in {second} but is in {first}" in message


def test_index_that_names_a_tensor_no_shard_has_is_an_error(
    checkpoint: Path, config: ModelConfig
) -> None:
    index = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    write_index(checkpoint, index | {"layers.0.ghost": SINGLE})
    assert "layers.0.ghost should be in model.safetensors but is in no shard" in failure(
        checkpoint, config
    )


def test_shard_with_a_tensor_the_index_lacks_is_an_error(
    checkpoint: Path, config: ModelConfig
) -> None:
    index = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    del index[NORM]
    write_index(checkpoint, index)
    assert f"tensor {NORM} is not in {INDEX}" in failure(checkpoint, config)


def test_index_with_another_total_size_is_an_error(checkpoint: Path, config: ModelConfig) -> None:
    index = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    write_index(checkpoint, index, total_size=17)
    assert "metadata.total_size is 17" in failure(checkpoint, config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"norm.weight": "../model.safetensors"}}', "no plain file name"),
        ('{"weight_map": {"norm.weight": 3}}', "no plain file name"),
    ],
)
def test_bad_index_is_an_error(
    checkpoint: Path, config: ModelConfig, text: str, expected: str
) -> None:
    (checkpoint / INDEX).write_text(text)
    message = failure(checkpoint, config)
    assert expected in message
    assert INDEX in message


def test_directory_without_weights_says_what_is_expected(
    tmp_path: Path, config: ModelConfig
) -> None:
    message = failure(tmp_path, config)
    assert INDEX in message
    assert "--load-format dummy" in message


def test_unknown_load_format_is_refused(tmp_path: Path, config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"--load-format 'gguf'.*auto, safetensors, dummy"):
        load_weights(tmp_path, config, load_format="gguf")


def test_dummy_weights_need_no_files_and_look_like_loaded_ones(
    pristine: Path, config: ModelConfig
) -> None:
    loaded = load_weights(pristine, config, draft=True)
    dummy = load_weights("/nonexistent", config, load_format="dummy", seed=7, draft=True)
    assert loaded.keys() == dummy.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor.view(torch.uint8), dummy[name].view(torch.uint8)), name


def test_dummy_weights_depend_on_the_seed_alone(config: ModelConfig) -> None:
    first, again, other = (random_weights(config, seed=seed)[NORM] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
