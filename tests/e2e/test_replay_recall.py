"""Bounded replay costs the embedded model no recall: what it finds in long prompts, with and without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tools.tiny_model.render import Renderer
from tools.tiny_model.scoring import held_out_samples

from dsserve.config.model import load_model_config
from dsserve.debug.forward import Case, CaseRunner

if TYPE_CHECKING:
    from pathlib import Path

    from tools.tiny_model.render import Sample

#: Rows of the evaluation table that look things up, up to eight windows back -> samples.
ROWS = {"key-value 256": 15, "needle 256": 10, "key-value 1K": 15, "needle 1K": 10}
#: Share of all prompts by which the scores may differ.
TWO_POINTS = 0.02
PAGE = 128
torch.set_num_threads(1)


def answers(runner: CaseRunner, sample: Sample, mode: str, cached_prefix: int) -> bool:
    """Whether the greedy answer is the reference, to its end token."""
    prompt, answer = sample.ids[: sample.prompt_len], sample.ids[sample.prompt_len :].tolist()
    case = Case(
        "x",
        prompt.tolist(),
        mode,
        cached_prefix=cached_prefix,
        decode_steps=len(answer),
        capture=frozenset({"greedy"}),
    )
    out = runner.run(case)
    tokens = next(value for name, value in out.items() if name.endswith("tokens"))
    return bool(tokens.tolist() == answer)


@pytest.mark.slow
def test_recall_is_the_same_within_two_points_with_replay_on(embedded_checkpoint: Path) -> None:
    runner = CaseRunner(embedded_checkpoint, load_model_config(embedded_checkpoint), "released")
    renderer = Renderer(embedded_checkpoint / "tokenizer.json")
    full = cold = hit = num_hits = 0
    for row, count in ROWS.items():
        for sample in held_out_samples(renderer, row, count):
            # A prefix of whole pages that leaves the question and a part of the context to compute.
            prefix = sample.prompt_len * 3 // 4 // PAGE * PAGE
            full += answers(runner, sample, "full", 0)
            cold += answers(runner, sample, "replay", 0)
            hit += answers(runner, sample, "replay", prefix)
            num_hits += prefix > PAGE
    total = sum(ROWS.values())
    assert num_hits >= total // 2, "too few prompts are longer than what a hit replays"
    assert full >= 0.8 * total, f"{full} of {total}: the model recalls too little to tell"
    assert abs(cold - full) <= TWO_POINTS * total, (full, cold)
    assert abs(hit - full) <= TWO_POINTS * total, (full, hit)
