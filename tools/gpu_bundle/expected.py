"""What the CPU says: greedy tokens of a served checkpoint, with the margin of each and its log-probability."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from dsserve.chat.recipe import ChatConverter
from dsserve.chat.settings import ChatSettings

if TYPE_CHECKING:
    import torch

NUM_STEPS = 24
#: Beyond it decoder replay makes a difference.
WINDOW = 128
QUESTIONS = (
    "What is 47 + 85?",
    "Sort these words: pear, apple, fig.",
    "What is the capital of France?",
    "Count from 3 to 12.",
    "Reverse the word harbor.",
    "What is 9 * 8?",
    "Which number is larger, 418 or 481?",
    "Say something short.",
)


def main(checkpoint: Path, target: Path) -> None:
    """Write the file."""
    cases = [
        {
            "name": f"ask{index}.{mode}",
            "input_ids": ids,
            "mode": mode,
            "decode_steps": NUM_STEPS,
            "capture": ["greedy"],
        }
        for index, ids in enumerate(_prompts(checkpoint))
        for mode in (("full", "replay") if len(ids) > WINDOW else ("full",))
    ]
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "in.json", Path(folder) / "out.safetensors"
        given.write_text(json.dumps({"cases": cases}))
        command = [sys.executable, "-m", "dsserve.cli.main", "debug", "forward"]
        command += ["--model-path", str(checkpoint), "--input", str(given), "--out", str(result)]
        subprocess.run(command, check=True)
        tensors = load_file(result)
    runs = {}
    for case in cases:
        prefix = case["name"] if case["mode"] == "replay" else f"{case['name']}.greedy"
        runs[case["name"]] = summary(tensors[f"{prefix}.tokens"], tensors[f"{prefix}.logits"])
    target.write_text(json.dumps({"cases": cases, "runs": runs}))


def summary(tokens: torch.Tensor, logits: torch.Tensor) -> dict[str, list[float]]:
    """Tokens [n], the distance of the two best log-probabilities, and that of the token."""
    scores = logits.double().log_softmax(-1)
    best = scores.topk(2, dim=-1).values
    chosen = scores.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    return {
        "tokens": tokens.tolist(),
        "margins": (best[:, 0] - best[:, 1]).tolist(),
        "logprobs": chosen.tolist(),
    }


def _prompts(checkpoint: Path) -> list[list[int]]:
    """Ids of the questions as chats, with thinking off, and of a longer text with a question behind it."""
    settings = ChatSettings(
        served_names=("embedded",), tokenizer_path=checkpoint, context_length=4096
    )
    converter = ChatConverter(settings)
    table = "\n".join(f"word{number}: {number * 7919 % 9000 + 1000}" for number in range(11, 41))
    texts = [*QUESTIONS, f"{table}\nWhich number belongs to word17?"]
    return [
        converter.prompt_ids(
            {
                "messages": [{"role": "user", "content": text}],
                "thinking": {"type": "disabled"},
            }
        )
        for text in texts
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
