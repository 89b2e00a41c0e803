"""`dsserve calibrate dspark`: the blocks it collects, its prompts, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from dsserve.cli.main import main as dsserve
from dsserve.config.model import load_model_config
from dsserve.debug import calibrate as tool
from dsserve.debug.calibrate import BlockCollector, Blocks, calibrate
from dsserve.debug.prompts import built_in_prompts, read_prompts
from dsserve.errors import ConfigError
from dsserve.speculative.calibrate import read_temperatures
from dsserve.worker.runner import load_model
from golden_runs import prompt_ids
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from dsserve.models.deepseek_v4.model import DeepseekV41Model

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
GAMMA, NUM_NEW = 3, 8


@pytest.fixture(scope="module")
def model() -> DeepseekV41Model:
    return load_model(
        CHECKPOINT,
        load_model_config(CHECKPOINT),
        numerics="fp32",
        context_length=512,
        device=torch.device("cpu"),
        draft=True,
    )


def collector(model: DeepseekV41Model) -> BlockCollector:
    assert model.draft is not None
    return BlockCollector(
        model, model.draft, gamma=GAMMA, max_new_tokens=NUM_NEW, device=torch.device("cpu")
    )


def greedy(model: DeepseekV41Model, prompt: list[int], count: int) -> list[int]:
    pool = Pool(model, num_requests=1)
    request = Request(pool, prompt, is_replay=True)
    tokens = [int(merged_forward(pool, [request.prefill(len(prompt))])[0][-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(merged_forward(pool, [request.decode(tokens[-1])])[0][-1].argmax()))
    return tokens


def test_blocks_are_those_of_greedy_rounds(
    model: DeepseekV41Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts that are right up to a known place, each round starts behind what the one before accepted."""
    prompt = prompt_ids(CHECKPOINT, "len17")
    tokens = greedy(model, prompt, NUM_NEW + 2 * GAMMA)
    assert model.draft is not None
    real = model.draft.propose
    num_right = {0: 2, 3: 3, 7: 0}

    def propose(anchors: torch.Tensor, positions: torch.Tensor, *args: object, **names: object):  # type: ignore[no-untyped-def]
        proposal = real(anchors, positions, *args, **names)  # type: ignore[arg-type]
        place = int(positions[0]) - len(prompt)
        assert int(anchors[0]) == tokens[place]
        right = torch.tensor([tokens[place + 1 : place + 1 + GAMMA]])
        wrong = torch.arange(GAMMA) >= num_right.get(place, 1)
        proposal.ids.copy_(torch.where(wrong, (right + 1) % 500, right))
        proposal.confidence_raw.fill_(place)
        return proposal

    monkeypatch.setattr(model.draft, "propose", propose)
    [blocks] = collector(model).collect([prompt])
    # Anchors 0 (two accepted), 3 (three): the next anchor would be 7, the last token, behind which nothing counts.
    assert blocks.raw.tolist() == [[0.0] * GAMMA, [3.0] * GAMMA]
    assert blocks.accepted.tolist() == [[True, True, False], [True, True, True]]


def test_prompts_side_by_side_give_what_each_gives_alone(model: DeepseekV41Model) -> None:
    prompts = [prompt_ids(CHECKPOINT, name) for name in ("len17", "len3")]
    together = collector(model).collect(prompts)
    for prompt, blocks in zip(prompts, together, strict=True):
        [alone] = collector(model).collect([prompt])
        assert len(blocks.raw)
        assert (blocks.raw == alone.raw).all()
        assert (blocks.accepted == alone.accepted).all()


def synthetic(count: int, per_prompt: int) -> list[Blocks]:
    rng = np.random.default_rng(7)
    parts = []
    for _ in range(count):
        raw = rng.normal(1, 2, (per_prompt, 3))
        chance = 1 / (1 + np.exp(-raw / 3))
        accepted = np.logical_and.accumulate(rng.random(raw.shape) < chance, axis=1)
        parts.append(Blocks(raw, accepted))
    return parts


def test_temperatures_are_judged_on_prompts_kept_apart() -> None:
    parts = synthetic(400, 20)
    report = calibrate(parts)
    assert report.calibration.num_blocks == 300 * 20
    assert report.num_held_out == 100 * 20
    assert sum(report.held_out_after) < 0.4 * sum(report.held_out_before)
    others = [Blocks(np.full_like(p.raw, -9.0), p.accepted) if i % 4 == 0 else p for i, p in enumerate(parts)]  # fmt: skip
    assert calibrate(others).calibration == report.calibration


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="more prompts"):
        calibrate(synthetic(3, 5))


def test_built_in_prompts_are_always_the_same_and_fit() -> None:
    config = load_model_config(CHECKPOINT)
    first, second = (built_in_prompts(CHECKPOINT, config, 24) for _ in range(2))
    assert first == second
    assert len({tuple(ids) for ids in first}) > 20
    assert all(0 <= i < config.vocab_size for ids in first for i in ids)


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    return path


def test_prompts_come_as_ids_text_or_messages(tmp_path: Path) -> None:
    config = load_model_config(CHECKPOINT)
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    path = write(tmp_path, {"input_ids": [0, 5, 7]}, {"prompt": "hello"}, chat)
    ids, text, messages = read_prompts(path, CHECKPOINT, config)
    assert ids == [0, 5, 7]
    assert 0 < len(text) < len(messages)


@pytest.mark.parametrize(
    "line", [[], {}, {"input_ids": []}, {"input_ids": [512]}, {"prompt": 3}, {"messages": []}]
)
def test_a_bad_prompt_is_refused_with_its_line(tmp_path: Path, line: object) -> None:
    config = load_model_config(CHECKPOINT)
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(write(tmp_path, {"input_ids": [1]}, line), CHECKPOINT, config)


def test_a_missing_or_empty_prompt_file_is_refused(tmp_path: Path) -> None:
    config = load_model_config(CHECKPOINT)
    with pytest.raises(ConfigError, match="none"):
        read_prompts(tmp_path / "none", CHECKPOINT, config)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(tmp_path / "empty", CHECKPOINT, config)


def test_the_command_writes_what_a_server_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = prompt_ids(CHECKPOINT, "len33")
    path = write(tmp_path, *({"input_ids": ids[: 4 + i]} for i in range(8)))
    out = tmp_path / "temperatures.json"
    arguments = ["--model-path", CHECKPOINT, "--prompts", path, "--out", out, "--max-new-tokens", 3]
    arguments += ["--speculative-num-draft-tokens", 3]
    assert dsserve(["calibrate", "dspark", *map(str, arguments)]) == 0
    assert len(read_temperatures(out, 2)) == 2
    assert "fitted on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculative-num-draft-tokens", "7"], "must be 2 to 6"),
        (["--speculative-num-draft-tokens", "1"], "must be 2 to 6"),
        (["--prompts", "/nowhere/x"], "/nowhere/x"),
    ],
)
def test_the_command_refuses_wrong_arguments_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model-path", str(CHECKPOINT), "--out", str(tmp_path / "t.json")]
    assert tool.main([*common, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_thing_to_calibrate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert dsserve(["calibrate", "dspork"]) == 2
    assert "did you mean dspark" in capsys.readouterr().err.lower()


@pytest.mark.slow
def test_temperatures_of_the_embedded_model_help_on_held_out_prompts(
    embedded_checkpoint: Path,
) -> None:
    config = load_model_config(embedded_checkpoint)
    embedded = load_model(
        embedded_checkpoint,
        config,
        numerics="released",
        context_length=config.max_position_embeddings,
        device=torch.device("cpu"),
        draft=True,
    )
    assert embedded.draft is not None
    blocks = BlockCollector(
        embedded,
        embedded.draft,
        gamma=config.dspark_block_size,
        max_new_tokens=48,
        device=torch.device("cpu"),
    ).collect(built_in_prompts(embedded_checkpoint, config))
    report = calibrate(blocks)
    assert report.num_held_out > 100
    assert sum(report.held_out_after) < 0.9 * sum(report.held_out_before)
