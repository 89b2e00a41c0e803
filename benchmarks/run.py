"""Runs benchmarks by name, prints a table and writes one JSON file per run into `benchmarks/results/`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.record import RESULTS, Figure, write_record

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Name -> module with `measure() -> list[Figure]`, imported when it runs.
BENCHMARKS = {
    "scheduler": "benchmarks.scheduler_steps",
    "radix": "benchmarks.radix_match",
    "radix-workloads": "benchmarks.radix_workloads",
    "text": "benchmarks.text_bridge",
    "http": "benchmarks.http_decode",
    "embedded": "benchmarks.embedded_model",
    "drafts": "benchmarks.drafts",
    "replay": "benchmarks.bounded_replay",
    "decode-step": "benchmarks.decode_step",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a benchmark failed, or missed its bar under `--strict`."""
    arguments = _parser().parse_args(argv)
    if arguments.list:
        sys.stdout.write("".join(f"{name}\n" for name in BENCHMARKS))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    for name in arguments.names or BENCHMARKS:
        try:
            measured = importlib.import_module(BENCHMARKS[name]).measure()
        except Exception as error:  # noqa: BLE001 - edge of the process: the other benchmarks still run
            failures[name] = f"{type(error).__name__}: {error}"
            sys.stdout.write(f"{name}: FAILED: {failures[name]}\n")
            continue
        figures += measured
        sys.stdout.write("".join(f"{_line(figure)}\n" for figure in measured))
        sys.stdout.flush()
    file = write_record(figures, failures, arguments.out)
    sys.stdout.write(f"written to {file}\n")
    missed = [figure.name for figure in figures if figure.is_met is False]
    return 1 if failures or (arguments.strict and missed) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--strict", action="store_true", help="fail if a bar is missed")
    parser.epilog = f"names: {', '.join(BENCHMARKS)}"
    return parser


def _line(figure: Figure) -> str:
    spread = "" if figure.p99 is None else f"  p50 {figure.p50:.1f}  p99 {figure.p99:.1f}"
    verdict = ""
    if figure.bar is not None:
        relation = ">=" if figure.higher_is_better else "<="
        verdict = f"  bar {relation} {figure.bar:g}: {'met' if figure.is_met else 'MISSED'}"
    return f"{figure.name}: {figure.value:.1f} {figure.unit}{spread}{verdict}"
