"""Teacher-forced exact match on held-out examples in the training forward: every answer token is the arg-max.

python -m tools.tiny_model.scoring --checkpoint DIR --out FILE [--count 64] [--rows NAME ..]

scores an exported checkpoint, whose weights are bit for bit those of the masters; without a GPU it is slow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from tools.tiny_model.config import engram_constants
from tools.tiny_model.data.mix import EVALUATION, held_out
from tools.tiny_model.model import Batch, Mode, Target
from tools.tiny_model.packing import Row, empty_row, place
from tools.tiny_model.params import Weights, build_groups, cook, masters_from_checkpoint
from tools.tiny_model.render import Renderer, Sample
from tools.tiny_model.verdicts import RowVerdicts, show_table, write_verdicts

from dsserve.config.model import load_model_config
from dsserve.models.deepseek_v4.weights import load_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

#: Longest sample of the evaluation, and the length of its packed rows.
MAX_LENGTH = 2048
_ROWS = 16
_POSITIONS = 4096
EVAL_SEED = 1


def held_out_samples(
    renderer: Renderer, name: str, count: int, seed: int = EVAL_SEED
) -> list[Sample]:
    """Rendered held-out examples that fit the context; fewer of them are the first ones of more."""
    rng = Random(f"render {name} {seed}")
    samples = [renderer.sample(example, rng) for example in held_out(name, seed, count)]
    return [sample for sample in samples if len(sample.ids) <= MAX_LENGTH]


def evaluate_target(
    target: Target, weights: Weights, tokenizer_file: Path, *, count: int, names: Iterable[str] | None = None,
    mode: Mode | None = None, dtype: torch.dtype = torch.bfloat16, rows_at_once: int = _ROWS,
) -> dict[str, RowVerdicts]:  # fmt: skip
    """Which examples of each row of the table are answered exactly."""
    renderer = Renderer(tokenizer_file)
    samples = {name: held_out_samples(renderer, name, count) for name in names or EVALUATION}
    rows: list[Row] = []
    for name, group in samples.items():
        for index, sample in enumerate(group):
            named = Sample(f"{name}/{index}", sample.ids, sample.prompt_len)
            fitting = next(
                (row for row in rows[-8:] if MAX_LENGTH - row.used >= len(named.ids)), None
            )
            if fitting is None:
                fitting = empty_row(MAX_LENGTH)
                rows.append(fitting)
            place(fitting, named)
    found: dict[str, bool] = {}
    for first in range(0, len(rows), rows_at_once):
        part = rows[first : first + rows_at_once]
        part = part + [empty_row(MAX_LENGTH)] * (rows_at_once - len(part))
        predicted = _predict(target, weights, part, mode or Mode(), dtype)
        for row, guess in zip(part, predicted, strict=True):
            for task, start, end in row.spans:
                found[task] = bool(
                    (guess[start - 1 : end - 1] == torch.from_numpy(row.ids[start:end])).all()
                )
    table: dict[str, RowVerdicts] = {}
    for name, group in samples.items():
        table[name] = RowVerdicts()
        for index, sample in enumerate(group):
            table[name].add(sample, right=found[f"{name}/{index}"])
    return table


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
        return logits.argmax(-1).view(len(rows), MAX_LENGTH).cpu()


def checkpoint_target(checkpoint: Path, device: torch.device) -> tuple[Target, Weights]:
    """The training forward with the weights of an exported checkpoint."""
    config = load_model_config(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    groups = build_groups(config, draft=False)
    masters = masters_from_checkpoint(groups, load_checkpoint(checkpoint, config, draft=True))
    cooked = {group.key: cook(group, masters[group.key]).to(device) for group in groups}
    constants = engram_constants(config, tokenizer)
    target = Target(config, constants, length=_POSITIONS, device=device)
    return target, Weights(groups, cooked, lambda tensor: tensor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rows", nargs="*", default=list(EVALUATION))
    options = parser.parse_args(argv)
    is_gpu = torch.cuda.is_available()
    target, weights = checkpoint_target(
        options.checkpoint, torch.device("cuda" if is_gpu else "cpu")
    )
    table = evaluate_target(
        target, weights, options.checkpoint / "tokenizer.json", count=options.count, names=options.rows,
        rows_at_once=_ROWS if is_gpu else 1,
    )  # fmt: skip
    write_verdicts(options.out, table)
    sys.stdout.write(f"{show_table(table)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
