"""Accept length of the DSpark head on held-out examples: greedy rounds along the reference answer, on the CPU.

python -m tools.tiny_model.acceptance --masters DIR | --checkpoint DIR [--count 8] [--tasks NAME ..]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from tools.tiny_model.checkpoint import load_masters
from tools.tiny_model.config import engram_constants, model_config
from tools.tiny_model.data.mix import EVALUATION
from tools.tiny_model.draft import Draft
from tools.tiny_model.model import Batch, Mode, Target
from tools.tiny_model.params import Weights, build_groups, cook, masters_from_checkpoint
from tools.tiny_model.render import Renderer
from tools.tiny_model.scoring import held_out_samples

from dsserve.config.model import ModelConfig, load_model_config
from dsserve.models.deepseek_v4.weights import load_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tools.tiny_model.params import Group
    from tools.tiny_model.render import Sample
    from torch import Tensor

    Masters = dict[str, Tensor]

TOKENIZER = Path(__file__).with_name("tokenizer.json")
#: Rows that are measured: those with short prompts.
TASKS = tuple(name for name in EVALUATION if not name.endswith("K"))
_SEED = 11


class AcceptanceMeter:
    """Target and draft head in float32 with the roundings of weights, activations and cache rows."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, masters: Callable[[bool], Masters]
    ) -> None:
        """Build both.

        Args:
            config: The model.
            tokenizer: Its tokenizer.
            masters: Gives the masters of the target (False) or of the draft head (True).
        """
        self._width = config.sliding_window
        self._gamma = config.dspark_block_size
        self._target = Target(
            config, engram_constants(config, tokenizer), length=4096, device=torch.device("cpu")
        )
        self._draft = Draft(config, self._target.window_table)
        self._weights, self._draft_weights = (
            self._cooked(build_groups(config, draft=draft), masters(draft))
            for draft in (False, True)
        )

    @classmethod
    def of_masters(cls, folder: Path) -> AcceptanceMeter:
        """What the trainer saved."""
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        return cls(
            model_config(tokenizer),
            tokenizer,
            lambda draft: load_masters(folder, "draft" if draft else "target"),
        )

    @classmethod
    def of_checkpoint(cls, folder: Path) -> AcceptanceMeter:
        """An exported checkpoint, its head included."""
        config = load_model_config(folder)
        tensors = load_checkpoint(folder, config, draft=True)
        return cls(
            config,
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            lambda draft: masters_from_checkpoint(build_groups(config, draft=draft), tensors),
        )

    @staticmethod
    def _cooked(groups: list[Group], masters: Masters) -> Weights:
        cooked = {group.key: cook(group, masters[group.key]) for group in groups}
        return Weights(groups, cooked, lambda tensor: tensor.float())

    def rounds(self, sample: Sample) -> tuple[int, int]:
        """(tokens, rounds) of an answer of at least two tokens: its first token is the first anchor.

        A draft counts as accepted if it is the reference token; the token behind the accepted ones is free.
        """
        size, first = len(sample.ids), sample.prompt_len
        length = -(-(size + self._gamma + 1) // self._width) * self._width
        ids = torch.zeros(1, length, dtype=torch.int64)
        ids[0, :size] = torch.from_numpy(sample.ids).long()
        start = torch.zeros(1, length, dtype=torch.int32)
        batch = Batch(ids, start, start)
        anchors = torch.arange(first - 1, size - 1)
        with torch.no_grad():
            out = self._target.forward(self._weights, batch, Mode(), dtype=torch.float32)
            block = self._draft.block(self._weights, self._draft_weights, out.taps, batch, anchors)
            drafts, _ = self._draft.propose(self._draft_weights, block, ids[0][anchors + 1])
        tokens = rounds = 0
        at = first  # position of the anchor
        while at < size - 1:
            wanted = ids[0, at + 1 : min(at + 1 + self._gamma, size)]
            same = (drafts[at - first][: len(wanted)] == wanted).long().cumprod(0)
            step = min(int(same.sum()) + 1, size - 1 - at)
            tokens, rounds, at = tokens + step, rounds + 1, at + step
        return tokens, rounds


def accept_lengths(
    meter: AcceptanceMeter, renderer: Renderer, *, count: int, tasks: Sequence[str] = TASKS,
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, float]:  # fmt: skip
    """Tokens a round, by task and (`all`) together.

    Args:
        meter: Target and head.
        renderer: Renders the examples.
        count: Examples per task.
        tasks: Rows of the evaluation.
        tell: Told the name, tokens and rounds of every task.
    """
    totals: dict[str, tuple[int, int]] = {}
    for name in tasks:
        samples = held_out_samples(renderer, name, count, _SEED)
        pairs = [meter.rounds(sample) for sample in samples]
        totals[name] = (sum(tokens for tokens, _ in pairs), sum(rounds for _, rounds in pairs))
        tell(name, *totals[name])
    totals["all"] = (
        sum(tokens for tokens, _ in totals.values()),
        sum(rounds for _, rounds in totals.values()),
    )
    return {name: tokens / max(rounds, 1) for name, (tokens, rounds) in totals.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--masters", type=Path, help="folder that the trainer wrote")
    source.add_argument("--checkpoint", type=Path, help="exported checkpoint")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.masters is not None:
        meter, tokenizer = AcceptanceMeter.of_masters(options.masters), TOKENIZER
    else:
        meter = AcceptanceMeter.of_checkpoint(options.checkpoint)
        tokenizer = options.checkpoint / "tokenizer.json"
    table = accept_lengths(
        meter, Renderer(tokenizer), count=options.count, tasks=options.tasks, tell=_tell
    )
    sys.stdout.write(f"{'all':16s} {table['all']:.2f}\n")
    if options.out is not None:
        options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return 0


def _tell(name: str, tokens: int, rounds: int) -> None:
    sys.stdout.write(
        f"{name:16s} {tokens / max(rounds, 1):.2f} ({tokens} tokens, {rounds} rounds)\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
