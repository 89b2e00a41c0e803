"""Scores an exported checkpoint with dsserve's exact CPU path: teacher-forced exact match and greedy decodes.

python -m tools.tiny_model.evaluate --checkpoint DIR [--count 32] [--decodes 20] [--tasks NAME ..] [--show]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tools.tiny_model.data.mix import EVALUATION
from tools.tiny_model.render import Renderer
from tools.tiny_model.scoring import held_out_samples

from dsserve.config.model import load_model_config
from dsserve.debug.forward import Case, CaseRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.tiny_model.render import Sample

_DECODE_SEED = 7


@dataclass(slots=True)
class Score:
    """Results of one row of the table.

    Attributes:
        exact: Share of samples whose every answer token is the arg-max (teacher-forced).
        tokens: Share of answer tokens that are.
        decoded: Share of greedy decodes equal to the reference, end token included.
        count: Teacher-forced samples.
        decodes: Decoded samples.
    """

    exact: float
    tokens: float
    decoded: float
    count: int
    decodes: int


class Evaluator:
    """One checkpoint under dsserve's `released` numerics."""

    def __init__(self, checkpoint: Path, numerics: str = "released") -> None:
        self.renderer = Renderer(checkpoint / "tokenizer.json")
        self._runner = CaseRunner(checkpoint, load_model_config(checkpoint), numerics)

    def forced(self, sample: Sample, mode: str = "full") -> list[int]:
        """The arg-max at every answer position, given the reference before it."""
        ids = sample.ids.tolist()
        out = self._runner.run(Case("x", ids, mode, capture=frozenset({"logits"})))
        logits = next(value for key, value in out.items() if key.endswith("logits"))
        first = len(ids) - sample.prompt_len
        result: list[int] = logits[-first - 1 : -1].argmax(-1).tolist()
        return result

    def decode(self, sample: Sample) -> list[int]:
        """As many greedy tokens as the reference has."""
        answer = len(sample.ids) - sample.prompt_len
        case = Case(
            "x",
            sample.ids[: sample.prompt_len].tolist(),
            decode_steps=answer,
            capture=frozenset({"greedy"}),
        )
        out = self._runner.run(case)
        result: list[int] = next(
            value for key, value in out.items() if key.endswith("tokens")
        ).tolist()
        return result

    def score(self, name: str, *, count: int, decodes: int, show: bool = False) -> Score:
        """One row of the table."""
        exact = right = total = 0
        samples = held_out_samples(self.renderer, name, count)
        for sample in samples:
            answer = sample.ids[sample.prompt_len :].tolist()
            guess = self.forced(sample)
            hits = sum(a == b for a, b in zip(answer, guess, strict=True))
            right, total = right + hits, total + len(answer)
            exact += hits == len(answer)
            if show and hits < len(answer):
                self._show(sample, guess)
        decoded = held_out_samples(self.renderer, name, decodes, _DECODE_SEED)
        same = sum(
            self.decode(sample) == sample.ids[sample.prompt_len :].tolist() for sample in decoded
        )
        return Score(
            exact / max(len(samples), 1),
            right / max(total, 1),
            same / max(len(decoded), 1),
            len(samples),
            len(decoded),
        )

    def _show(self, sample: Sample, guess: list[int]) -> None:
        decode = self.renderer.tokenizer.decode
        prompt = decode(sample.ids[: sample.prompt_len].tolist(), skip_special_tokens=False)
        answer = decode(sample.ids[sample.prompt_len :].tolist(), skip_special_tokens=False)
        sys.stdout.write(
            f"--- {prompt[-400:]!r}\n  want {answer!r}\n  got  {decode(guess, skip_special_tokens=False)!r}\n"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--decodes", type=int, default=20)
    parser.add_argument("--tasks", nargs="*", default=list(EVALUATION))
    parser.add_argument("--show", action="store_true", help="print what went wrong")
    parser.add_argument("--out", type=Path, default=None, help="table as JSON")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    evaluator = Evaluator(options.checkpoint)
    table = {}
    for name in options.tasks:
        began = time.monotonic()
        score = evaluator.score(
            name, count=options.count, decodes=options.decodes, show=options.show
        )
        table[name] = {
            "exact": score.exact,
            "tokens": score.tokens,
            "decoded": score.decoded,
            "count": score.count,
            "decodes": score.decodes,
        }
        sys.stdout.write(
            f"{name:16s} exact {score.exact:.3f} of {score.count}, tokens {score.tokens:.4f}, "
            f"decoded {score.decoded:.3f} of {score.decodes} ({time.monotonic() - began:.0f} s)\n"
        )
        sys.stdout.flush()
        if options.out is not None:
            options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
