"""The mean of the masters of several runs: `python -m tools.tiny_model.average --masters RUN RUN .. --out RUN`.

Runs that go on from one another end at points around the same minimum; their mean lies closer to it than either, and so
recalls a little better. The draft head is not averaged: take that of the last run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tools.tiny_model.checkpoint import load_masters, save_masters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def mean_masters(runs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every master, summed in float64.

    Raises:
        ValueError: If the runs do not have the same masters.
    """
    first = runs[0]
    if any(run.keys() != first.keys() for run in runs):
        raise ValueError("the runs are of different architectures")
    return {key: torch.stack([run[key].double() for run in runs]).mean(0).float() for key in first}


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masters", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    runs = [load_masters(folder, "target") for folder in options.masters]
    save_masters(options.out, "target", mean_masters(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
