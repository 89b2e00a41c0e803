"""Golden prompts through fed layers: which ones, what they are fed, and whether the reference is the golden one."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from dsserve.worker.runner import load_model
from dsserve_kernels.select import select_operators
from golden_runs import equal_rows, golden, model, model_config, prompt_ids
from layer_checks import Judgement, judge, rounded_again
from layer_runs import LayerRun, LayerRuns, Other

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from dsserve.models.deepseek_v4.model import DeepseekV41Model

NUMERICS = "released"
PROMPTS_A = ("len17", "len33", "len64", "len70", "len90", "len100")
PROMPTS_G = ("len129", "len140", "len300")
#: Golden tokens decoded behind a prompt that has some.
NUM_DECODED = 4
#: Rows of a layer in which the reference's choice is the golden one, at least; prompt 300 of G meets a tie
#: (`golden_runs.STATISTICAL`).
GOLDEN_CHOICES, GOLDEN_CHOICES_BEHIND_TIE = 0.99, 0.6


@cache
def device_model(path: Path, device: str) -> DeepseekV41Model:
    """A checkpoint with the operators of CUDA, wherever it is."""
    loaded = load_model(
        path,
        model_config(path),
        numerics=NUMERICS,
        context_length=512,
        device=torch.device(device),
    )
    # All layers hold this object.
    vars(loaded.ops).update(vars(select_operators("cuda", NUMERICS)))
    return loaded


def run_layers(
    path: Path, prompt: str, model_on_device: DeepseekV41Model, device: str
) -> Judgement:
    """A prompt and golden tokens behind it through all layers of a device, each fed what the reference has there."""
    reference, known = model(path, NUMERICS), golden(path, NUMERICS)
    ids = prompt_ids(path, prompt)
    tokens = known.get(f"{prompt}.greedy.tokens", torch.empty(0, dtype=torch.int32))
    others = [
        Other(model_on_device, torch.device(device)),
        Other(reference, torch.device("cpu"), rounded_again),
    ]
    layers = LayerRuns(reference, others, length=len(ids) + NUM_DECODED)
    runs = layers.run(ids, tokens[:NUM_DECODED].tolist(), _golden_inputs(path, prompt, len(ids)))
    found = judge(runs, block_size=reference.config.candidate_block_size)
    share = _golden_choices(path, prompt, runs[: reference.config.num_hidden_layers])
    if share < (GOLDEN_CHOICES_BEHIND_TIE if prompt == "len300" else GOLDEN_CHOICES):
        found.failures.append(f"rows in which the reference chose as the golden file: {share:.3f}")
    return found


def _golden_inputs(path: Path, prompt: str, num_rows: int) -> dict[str, Tensor]:
    """Golden streams and mixes, where the file has those of all rows."""
    prefix = f"{prompt}.layer."
    return {
        key.removeprefix(f"{prompt}."): tensor
        for key, tensor in golden(path, NUMERICS).items()
        if key.startswith(prefix) and key.endswith(("stream", "next_pre"))
        if tensor.shape[0] == num_rows
    }


def _golden_choices(path: Path, prompt: str, runs: Sequence[LayerRun]) -> float:
    """The lowest share of rows in which the reference chose what the golden file has."""
    shares = []
    for run in runs:
        for kind in ("topk", "route_ids"):
            expected = golden(path, NUMERICS).get(f"{prompt}.layer.{run.layer}.{kind}")
            if expected is not None:
                ours = run.reference.tensors[kind][-expected.shape[0] :]
                shares.append(equal_rows(expected.long(), ours.long()))
    return min(shares)
