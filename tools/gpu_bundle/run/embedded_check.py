"""Greedy tokens of the served checkpoint on the device against those of the CPU, up to near-ties.

embedded_check.py FOLDER CHECKPOINT DSSERVE [FLAG...]: the folder holds expected.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

#: Two tokens whose log-probabilities on the CPU are closer than this may change places.
NEAR_TIE = 0.25
EOS = 1


def main() -> int:
    """Run and compare; returns the exit code."""
    folder, checkpoint, dsserve, flags = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
    expected = json.loads((Path(folder) / "expected.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        given, result = Path(scratch) / "in.json", Path(scratch) / "out.safetensors"
        given.write_text(json.dumps({"cases": expected["cases"]}))
        command = [
            dsserve,
            "debug",
            "forward",
            "--model-path",
            str(checkpoint),
            "--input",
            str(given),
        ]
        subprocess.run([*command, "--out", str(result), "--device", "cuda", *flags], check=True)
        tensors = load_file(result)
    failures, distances, num_equal = 0, [], 0
    for case in expected["cases"]:
        name = case["name"]
        prefix = name if case["mode"] == "replay" else f"{name}.greedy"
        tokens, logits = tensors[f"{prefix}.tokens"].tolist(), tensors[f"{prefix}.logits"]
        ok, text, near = compare(expected["runs"][name], tokens, logits.double().log_softmax(-1))
        distances += near
        failures += not ok
        num_equal += text == "equal"
        sys.stdout.write(f"{'ok  ' if ok else 'FAIL'} {name}: {text}\n")
    mean = sum(distances) / max(len(distances), 1)
    sys.stdout.write(
        f"{num_equal} of {len(expected['cases'])} equal up to the end token, {failures} failed; mean distance of "
        f"log-probabilities {mean:.5f}, greatest {max(distances, default=0):.5f}\n"
    )
    return 1 if failures else 0


def compare(run: dict[str, Any], tokens: list[int], scores: Any) -> tuple[bool, str, list[float]]:
    """Whether the tokens agree up to the end token or a near-tie; and how far log-probabilities are apart."""
    distances = []
    for step, (theirs, ours) in enumerate(zip(run["tokens"], tokens, strict=True)):
        distances.append(abs(float(scores[step, theirs]) - run["logprobs"][step]))
        if theirs != ours:
            margin = run["margins"][step]
            text = f"token {step} is {ours}, not {theirs}; margin on the CPU {margin:.4f}"
            return margin < NEAR_TIE, text, distances
        if theirs == EOS:
            break
    return True, "equal", distances


if __name__ == "__main__":
    sys.exit(main())
