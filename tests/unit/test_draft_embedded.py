"""The served draft head of the embedded model against the forward it was trained with (float32, apart from ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tools.tiny_model.acceptance import AcceptanceMeter
from tools.tiny_model.render import Renderer
from tools.tiny_model.scoring import held_out_samples

from dsserve.config.model import load_model_config
from dsserve.models.deepseek_v4.draft_context import history_rows
from dsserve.worker.runner import load_model
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from pathlib import Path

    from tools.tiny_model.render import Sample

    from dsserve.models.deepseek_v4.model import DeepseekV41Model

TASKS = ("copy", "counting", "json", "story", "several turns", "client")
PER_TASK = 4


def rounds(model: DeepseekV41Model, sample: Sample) -> tuple[int, int]:
    """Tokens and rounds along the reference answer, counted as `AcceptanceMeter.rounds` counts them."""
    assert model.draft is not None
    ids, first = [int(i) for i in sample.ids], sample.prompt_len
    gamma, window = model.config.dspark_block_size, model.config.sliding_window
    pool = Pool(model, num_requests=1, length=len(ids) + gamma + 1)
    request = Request(pool, ids[:first])
    merged_forward(pool, [request.prefill(first)])
    tokens = count = 0
    at = first
    while at < len(ids) - 1:
        with torch.inference_mode():
            index = history_rows(
                torch.tensor([request.slot]),
                torch.tensor([at - 1]),
                torch.tensor([0]),
                window=window,
                ring_rows=pool.runner.pools.layout.window_ring_rows,
            )
            drafts = model.draft.propose(
                torch.tensor([ids[at]]),
                torch.tensor([at]),
                index,
                gamma=gamma,
                pools=pool.runner.pools,
            ).ids[0]
        wanted = torch.tensor(ids[at + 1 : at + 1 + gamma])
        accepted = int((drafts[: len(wanted)] == wanted).long().cumprod(0).sum())
        step = min(accepted + 1, len(ids) - 1 - at)
        run = request.planner.step(ids[at : at + step], at, (), tail_len=step)
        merged_forward(pool, [run])
        tokens, count, at = tokens + step, count + 1, at + step
    return tokens, count


@pytest.mark.slow
def test_accept_length_is_that_of_the_training_forward(embedded_checkpoint: Path) -> None:
    config = load_model_config(embedded_checkpoint)
    model = load_model(
        embedded_checkpoint,
        config,
        numerics="released",
        context_length=config.max_position_embeddings,
        device=torch.device("cpu"),
        draft=True,
    )
    meter = AcceptanceMeter.of_checkpoint(embedded_checkpoint)
    renderer = Renderer(embedded_checkpoint / "tokenizer.json")
    ours, theirs = [], []
    for task in TASKS:
        for sample in held_out_samples(renderer, task, PER_TASK, seed=23):
            if len(sample.ids) - sample.prompt_len < 2:
                continue
            ours.append(rounds(model, sample))
            theirs.append(meter.rounds(sample))
    assert len(ours) > 10
    lengths = [sum(t for t, _ in part) / sum(r for _, r in part) for part in (ours, theirs)]
    assert lengths[0] > 1.5
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05), lengths
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    assert same >= 0.75 * len(ours), (same, len(ours))
