"""Teacher-forced exact match on held-out examples: every answer token is the arg-max given those before it."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch
from tools.tiny_model.data.mix import EVALUATION, held_out
from tools.tiny_model.model import Batch, Mode
from tools.tiny_model.packing import Row, empty_row, place
from tools.tiny_model.render import Renderer, Sample

if TYPE_CHECKING:
    from pathlib import Path

    from tools.tiny_model.model import Target
    from tools.tiny_model.params import Weights
    from torch import Tensor

_ROW_LENGTH = 2048
_ROWS = 16
EVAL_SEED = 1


def held_out_samples(
    renderer: Renderer, name: str, count: int, seed: int = EVAL_SEED
) -> list[Sample]:
    """Rendered held-out examples that fit the context."""
    rng = Random(f"render {name} {seed}")
    samples = [renderer.sample(example, rng) for example in held_out(name, seed, count)]
    return [sample for sample in samples if len(sample.ids) <= _ROW_LENGTH]


def evaluate_target(
    target: Target, weights: Weights, tokenizer_file: Path, *, count: int, mode: Mode | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, float]:  # fmt: skip
    """Share of exact answers per row of the table."""
    renderer = Renderer(tokenizer_file)
    rows: list[Row] = []
    for name in EVALUATION:
        for sample in held_out_samples(renderer, name, count):
            named = Sample(name, sample.ids, sample.prompt_len)
            fitting = next(
                (row for row in rows[-8:] if _ROW_LENGTH - row.used >= len(named.ids)), None
            )
            if fitting is None:
                fitting = empty_row(_ROW_LENGTH)
                rows.append(fitting)
            place(fitting, named)
    found: dict[str, list[bool]] = {}
    for first in range(0, len(rows), _ROWS):
        part = rows[first : first + _ROWS]
        part = part + [empty_row(_ROW_LENGTH)] * (_ROWS - len(part))
        predicted = _predict(target, weights, part, mode or Mode(), dtype)
        for row, guess in zip(part, predicted, strict=True):
            for task, start, end in row.spans:
                found.setdefault(task, []).append(
                    bool((guess[start - 1 : end - 1] == torch.from_numpy(row.ids[start:end])).all())
                )
    return {name: sum(values) / len(values) for name, values in found.items()}


def _predict(
    target: Target, weights: Weights, rows: list[Row], mode: Mode, dtype: torch.dtype
) -> Tensor:
    def put(name: str) -> Tensor:
        return torch.stack([torch.from_numpy(getattr(row, name)) for row in rows]).to(target.device)

    with torch.no_grad():
        out = target.forward(
            weights, Batch(put("ids").long(), put("start"), put("floor")), mode, dtype=dtype
        )
        logits = target.logits(weights, out.hidden)
        return logits.argmax(-1).view(len(rows), _ROW_LENGTH).cpu()


def show_table(table: dict[str, float]) -> str:
    """One line per row."""
    return "\n".join(f"{name:20s} {value:.3f}" for name, value in table.items())
