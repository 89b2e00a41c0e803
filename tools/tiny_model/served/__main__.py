"""Scores a checkpoint through the HTTP API of `dsserve launch` and fails below the thresholds; `make eval-tiny`.

python -m tools.tiny_model.served [--checkpoint DIR] [--count 64] [--rows NAME,NAME] [--out FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.http_server import ServerFailed
from rich.console import Console
from tools.tiny_model.scoring import EVAL_SEED
from tools.tiny_model.served.client import RequestFailed
from tools.tiny_model.served.report import line, rich_table, write_json, write_markdown
from tools.tiny_model.served.rows import Misuse, select_rows
from tools.tiny_model.served.run import Runner

from dsserve.cli.default_model import embedded_model

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_RESULT = 2
_TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 1 if a row is below its threshold, 2 if nothing could be measured."""
    options = _parser().parse_args(argv)
    # So that the server is stopped whichever way this process ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        specs = select_rows(name.strip() for name in options.rows.split(",") if name.strip())
        runner = Runner(_checkpoint(options.checkpoint), options.count, options.seed)
        for result in runner.run(specs):
            sys.stdout.write(f"{line(result)}\n")
            sys.stdout.flush()
            # After every row, so that a run that is broken off leaves what it found.
            if options.out is not None:
                write_json(options.out, runner.findings, _settings(runner, began))
    except (Misuse, ServerFailed, RequestFailed) as error:
        sys.stderr.write(f"eval-tiny: {error}\n")
        return _NO_RESULT
    order = {spec.name: number for number, spec in enumerate(specs)}
    results = sorted(runner.findings.results, key=lambda result: order[result.spec.name])
    Console().print(rich_table(results))
    if options.markdown is not None:
        write_markdown(options.markdown, results)
    missed = [result.spec.name for result in results if not result.passed]
    sys.stdout.write(f"below: {', '.join(missed)}\n" if missed else "all rows pass\n")
    return 1 if missed else 0


def _checkpoint(given: Path | None) -> Path:
    checkpoint = given or embedded_model()
    if not (checkpoint / "config.json").is_file():
        raise Misuse(f"no checkpoint in {checkpoint}; name one by --checkpoint")
    return checkpoint


def _settings(runner: Runner, began_s: float) -> dict[str, Any]:
    return {
        "checkpoint": runner.checkpoint.name,
        "count": runner.count,
        "seed": runner.seed,
        "seconds": round(time.monotonic() - began_s),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_model.served", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=None, help="[the embedded model]")
    parser.add_argument("--count", type=int, default=64, help="examples per row [64]")
    parser.add_argument(
        "--seed",
        type=int,
        default=EVAL_SEED,
        help=f"of the draw of held-out examples [{EVAL_SEED}, as the trainer's]",
    )
    parser.add_argument("--rows", default="", help="rows, separated by commas [all]")
    parser.add_argument("--out", type=Path, default=None, help="JSON file with every wrong case")
    parser.add_argument(
        "--markdown",
        type=Path,
        default=None,
        help="Markdown file to write the table to, or into its place in a document",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
