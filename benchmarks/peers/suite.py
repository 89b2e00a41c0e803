"""Chooses suites and implementations, runs them in turns and records what came out."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import prefix, steps, text
from benchmarks.peers.report import markdown
from benchmarks.peers.rows import Rows
from benchmarks.peers.schedulers import our_scheduler
from benchmarks.peers.sglang_trees import sglang_kinds
from benchmarks.peers.sizes import FULL, TINY, Sizes
from benchmarks.peers.tokenspeed import tokenspeed_kinds
from benchmarks.peers.trees import our_kinds
from benchmarks.record import RESULTS, write_record

if TYPE_CHECKING:
    from collections.abc import Sequence

SUITES = ("prefix", "steps", "text")


class Peers:
    """What can be imported; each peer that cannot is named once."""

    def __init__(self, *, only_ours: bool, suites: Sequence[str]) -> None:
        self.left_out: list[str] = []
        self.caches = our_kinds()
        self.schedulers = [our_scheduler()]
        if only_ours:
            return
        if "prefix" in suites:
            try:
                self.caches += sglang_kinds()
            except (ImportError, RuntimeError) as error:
                self.leave_out(f"SGLang's prefix caches: {error}")
        if "prefix" in suites or "steps" in suites:
            try:
                cache, scheduler = tokenspeed_kinds()
                self.caches.append(cache)
                self.schedulers.append(scheduler)
            except ImportError as error:
                self.leave_out(f"TokenSpeed: {error}")

    def leave_out(self, reason: str) -> None:
        """Say and remember what is missing."""
        self.left_out.append(reason)
        sys.stdout.write(f"left out: {reason}\n")


def run(
    suites: Sequence[str], sizes: Sizes, *, only_ours: bool = False
) -> tuple[Rows, list[str], list[str]]:
    """Run suites; returns the rows, the load after each suite, and what was left out."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows, loads = Rows(), []
    peers = Peers(only_ours=only_ours, suites=suites)
    gc.freeze()  # what the peers' imports made need not be looked at before each measurement
    for suite in suites:
        if suite == "prefix":
            prefix.measure(peers.caches, sizes, rows)
        elif suite == "steps":
            steps.measure(peers.schedulers, sizes, rows)
        else:
            text.measure(sizes, rows, peers.leave_out, only_ours=only_ours)
        loads.append(f"{suite} {os.getloadavg()[0]:.1f}")
    return rows, loads, peers.left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing, for a test")
    parser.add_argument("--only-ours", action="store_true", help="without peers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    arguments = parser.parse_args(argv)
    suites = arguments.suites or SUITES
    unknown = sorted(set(suites) - set(SUITES))
    if unknown:
        parser.error(f"unknown suites: {', '.join(unknown)}")
    rows, loads, left_out = run(
        suites, TINY if arguments.tiny else FULL, only_ours=arguments.only_ours
    )
    table = markdown(rows, loads, left_out)
    sys.stdout.write(table)
    if arguments.markdown is not None:
        arguments.markdown.write_text(table, encoding="utf-8")
    figures = [row.figure(rows.ours(row.workload)) for row in rows.all()]
    missing = {reason.partition(":")[0]: reason for reason in left_out}
    file = write_record(figures, missing, arguments.out)
    sys.stdout.write(f"written to {file}\n")
    return 0
