"""The same tensors whatever pieces a prompt is computed in: chunks of 16, 33, 64, and single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from golden_runs import (
    NEAR,
    RUNS_A,
    Run,
    differing,
    golden,
    keys_of,
    logit_stats,
    model,
    output,
    pair,
    prompt_ids,
)
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from pathlib import Path

CHUNKS = (16, 33, 64)
FULL_A = [run for run in RUNS_A if run.mode == "full"]
CHUNKED_A = [(run, chunk) for run in FULL_A for chunk in CHUNKS if int(run.prompt[3:]) > chunk]


def names(value: object) -> str:
    return str(value)


def check_chunked(path: Path, run: Run, chunk: int, *, greedy: bool) -> None:
    out = output(path, "released", run, chunk, greedy=greedy)
    keys = keys_of(path, "released", run)
    if not greedy:
        keys = [key for key in keys if ".greedy." not in key]
    assert differing(path, "released", [key for key in keys if not key.endswith(NEAR)], out) == []


@pytest.mark.parametrize(("run", "chunk"), CHUNKED_A, ids=names)
def test_chunks_of_checkpoint_a_are_equal(golden_a: Path, run: Run, chunk: int) -> None:
    check_chunked(golden_a, run, chunk, greedy=False)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("run", [run for run in RUNS_A if run.mode == "replay"], ids=str)
def test_chunks_of_replays_of_checkpoint_a_are_equal(golden_a: Path, run: Run, chunk: int) -> None:
    check_chunked(golden_a, run, chunk, greedy=True)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("run", [run for run in RUNS_A if run.mode == "dense"], ids=str)
def test_chunks_with_every_position_chosen_are_equal(golden_a: Path, run: Run, chunk: int) -> None:
    out = output(golden_a, "released", run, chunk, greedy=False)
    assert differing(golden_a, "released", [f"{run.key_prefix}logits"], out) == []


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("run", [Run("len129"), Run("len140")], ids=str)
def test_chunks_of_checkpoint_g_are_equal(golden_geom: Path, run: Run, chunk: int) -> None:
    check_chunked(golden_geom, run, chunk, greedy=False)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_of_the_long_prompt_of_checkpoint_g_equal_its_one_shot_run(
    golden_geom: Path, chunk: int
) -> None:
    whole = output(golden_geom, "released", Run("len300"))
    pieces = output(golden_geom, "released", Run("len300"), chunk, greedy=False)
    assert [key for key in pieces if not torch.equal(pieces[key], whole[key])] == []


def token_by_token(path: Path, prompts: list[str]) -> dict[str, torch.Tensor]:
    """Logits of prompts that run one token a step, all of them side by side."""
    pool = Pool(model(path, "released"), num_requests=len(prompts))
    requests = {prompt: Request(pool, prompt_ids(path, prompt)) for prompt in prompts}
    rows: dict[str, list[torch.Tensor]] = {prompt: [] for prompt in prompts}
    while running := [prompt for prompt in prompts if requests[prompt].num_left]:
        plans = [requests[prompt].prefill(1) for prompt in running]
        for prompt, logits in zip(running, merged_forward(pool, plans), strict=True):
            rows[prompt].append(logits)
    return {prompt: torch.cat(pieces) for prompt, pieces in rows.items()}


def test_single_tokens_of_all_prompts_of_checkpoint_a_side_by_side_are_equal(
    golden_a: Path,
) -> None:
    prompts = [run.prompt for run in FULL_A]
    logits = token_by_token(golden_a, prompts)
    data = golden(golden_a, "released")
    different = [
        prompt for prompt in prompts if not torch.equal(logits[prompt], data[f"{prompt}.logits"])
    ]
    assert different == []


def test_single_tokens_of_checkpoint_g_side_by_side_are_equal(golden_geom: Path) -> None:
    prompts = ["len2", "len129", "len140"]
    logits = token_by_token(golden_geom, prompts)
    data = golden(golden_geom, "released")
    different = [
        prompt for prompt in prompts if not torch.equal(logits[prompt], data[f"{prompt}.logits"])
    ]
    assert different == []


def test_forced_decode_of_the_long_prompt_of_checkpoint_g_is_near(golden_geom: Path) -> None:
    """After the tie of `test_golden_released` a free run takes other tokens, so the golden ones are fed."""
    data = golden(golden_geom, "released")
    tokens = data["len300.greedy.tokens"].tolist()
    pool = Pool(model(golden_geom, "released"), num_requests=1)
    request = Request(pool, prompt_ids(golden_geom, "len300"))
    rows = merged_forward(pool, [request.prefill(300)])[0][-1:]
    for token in tokens[:-1]:
        rows = torch.cat((rows, merged_forward(pool, [request.decode(token)])[0]))
    stats = logit_stats(data["len300.greedy.logits"], rows)
    assert stats.median < 0.7
    assert stats.argmax_equal >= 0.88


def test_pieces_leave_no_gap(golden_a: Path) -> None:
    """A prompt in pieces has all rows of the whole prompt, in order."""
    run = Run("len90")
    out = output(golden_a, "released", run, 33, greedy=False)
    expected, ours = pair(golden_a, "released", "len90.logits", out)
    assert ours.shape == out["len90.logits"].shape == expected.shape
