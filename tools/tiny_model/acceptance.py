"""Accept length of the DSpark head on held-out examples: greedy rounds along the reference answer, on the CPU.

python -m tools.tiny_model.acceptance --masters DIR [--count 8] [--tasks NAME ..]
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
from tools.tiny_model.params import Weights, build_groups, cook
from tools.tiny_model.render import Renderer
from tools.tiny_model.scoring import held_out_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.tiny_model.render import Sample

TOKENIZER = Path(__file__).with_name("tokenizer.json")
_SEED = 11


class AcceptanceMeter:
    """Target and draft head in float32 with the roundings of weights, activations and cache rows."""

    def __init__(self, masters: Path) -> None:
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        config = model_config(tokenizer)
        self._width = config.sliding_window
        self._gamma = config.dspark_block_size
        self._target = Target(
            config, engram_constants(config, tokenizer), length=4096, device=torch.device("cpu")
        )
        self._draft = Draft(config, self._target.window_table)
        self._weights, self._draft_weights = (
            self._load(masters, draft=draft) for draft in (False, True)
        )

    def _load(self, folder: Path, *, draft: bool) -> Weights:
        groups = build_groups(self._target.config, draft=draft)
        masters = load_masters(folder, "draft" if draft else "target")
        return Weights(
            groups, {g.key: cook(g, masters[g.key]) for g in groups}, lambda tensor: tensor.float()
        )

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masters", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument(
        "--tasks", nargs="*", default=[name for name in EVALUATION if not name.endswith("K")]
    )
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    meter, renderer = AcceptanceMeter(options.masters), Renderer(TOKENIZER)
    table: dict[str, float] = {}
    all_tokens = all_rounds = 0
    for name in options.tasks:
        pairs = [
            meter.rounds(sample)
            for sample in held_out_samples(renderer, name, options.count, _SEED)
        ]
        tokens, rounds = (sum(pair[i] for pair in pairs) for i in (0, 1))
        all_tokens, all_rounds = all_tokens + tokens, all_rounds + rounds
        table[name] = tokens / max(rounds, 1)
        sys.stdout.write(f"{name:16s} {table[name]:.2f} ({tokens} tokens, {rounds} rounds)\n")
        sys.stdout.flush()
    table["all"] = all_tokens / max(all_rounds, 1)
    sys.stdout.write(f"{'all':16s} {table['all']:.2f}\n")
    if options.out is not None:
        options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
