"""What do drafts bring on this machine? Accept length and tokens a second of the embedded model, with DSpark and without.

Greedy chat requests of its own tasks (held-out examples of one context of 256 tokens and all short tasks), sent by 1, 8 and
32 clients at a time. Tokens a second are all tokens of the replies over the time from the first request to the last reply.

`python -m benchmarks drafts` runs all of it here; `python -m benchmarks.drafts --device cuda --out FILE` on a device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools.tiny_model.data.mix import EVALUATION
from tools.tiny_model.render import Renderer
from tools.tiny_model.served.cases import Case, Reply, build_cases
from tools.tiny_model.served.client import ask_all
from tools.tiny_model.served.server import read_counter

from benchmarks.http_server import Server, running_server
from benchmarks.record import Figure
from dsserve.cli.default_model import embedded_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME = "dsserve-tiny"
_DSPARK = ("--speculative-algorithm", "DSPARK")
SETUPS = {
    "none": ("--speculative-algorithm", "none"),
    "static_3": (*_DSPARK, "--speculative-num-draft-tokens", "4"),
    "static_5": (*_DSPARK, "--speculative-num-draft-tokens", "6"),
    "scheduled": (*_DSPARK, "--speculative-dspark-verify", "compact"),
}
#: Clients -> requests in all.
REQUESTS = {1: 12, 8: 32, 32: 64}
_LONG = ("1K", "2K")
#: The engine reports its counters about once a second.
_REPORT_S = 3.0


def measure() -> list[Figure]:
    """Run the same requests against a server of each setup."""
    cases = _cases(embedded_model(), max(REQUESTS.values()))
    figures = []
    for setup, flags in SETUPS.items():
        figures += _measure_setup(setup, flags, REQUESTS, cases)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure some setups on a device; the values are written by name after each setup. Returns the exit code."""
    options = parser().parse_args(argv)
    model: Path = options.model_path or embedded_model()
    place = ("--device", options.device, "--model-path", str(model.resolve()))
    requests = dict(options.requests or REQUESTS)
    cases = _cases(model, max(requests.values()))
    values: dict[str, float] = {}
    for setup in options.setups:
        figures = _measure_setup(setup, (*SETUPS[setup], *place), requests, cases)
        values |= {figure.name: round(figure.value, 2) for figure in figures}
        options.out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        names = [figure.name.removeprefix(f"drafts.{setup}.") for figure in figures]
        shown = (f"{name} {each.value:.1f}" for name, each in zip(names, figures, strict=True))
        sys.stdout.write(f"{setup}: {', '.join(shown)}\n")
        sys.stdout.flush()
    return 0


def parser() -> argparse.ArgumentParser:
    """What `main` takes."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    options.add_argument("--device", default="auto", help="of the server")
    options.add_argument("--model-path", type=Path, help="checkpoint [the embedded model]")
    options.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    options.add_argument(
        "--requests", nargs="+", type=_pair, metavar="CLIENTS:REQUESTS", help="how many are sent"
    )
    options.add_argument("--out", type=Path, required=True, help="file of the values (JSON)")
    return options


def _pair(text: str) -> tuple[int, int]:
    clients, _, count = text.partition(":")
    pair = int(clients), int(count)
    if min(pair) < 1:
        raise ValueError(text)
    return pair


def _measure_setup(
    setup: str, flags: tuple[str, ...], requests: Mapping[int, int], cases: Sequence[Case]
) -> list[Figure]:
    with running_server(model=NAME, flags=flags) as server:
        return _measure(server, setup, flags, requests, cases)


def _measure(
    server: Server,
    setup: str,
    flags: tuple[str, ...],
    requests: Mapping[int, int],
    cases: Sequence[Case],
) -> list[Figure]:
    _ask(server, cases[:8], 8)
    has_drafts = setup != "none"
    before = _accept_lengths(server) if has_drafts else (0, 0)
    figures = []
    for clients, count in requests.items():
        settings = {"checkpoint": NAME, "flags": " ".join(flags), "clients": clients}
        began_s = time.perf_counter()
        replies = _ask(server, cases[:count], clients)
        took_s = time.perf_counter() - began_s
        num_tokens = sum(reply.completion_tokens for reply in replies)
        rate = num_tokens / took_s
        figures.append(
            Figure(
                f"drafts.{setup}.{clients}_streams", "tokens/s", rate, None, None, num_tokens,
                higher_is_better=True, settings=settings | {"requests": count},
            )
        )  # fmt: skip
        after = _accept_lengths(server) if has_drafts else before
        total, calls = (new - old for new, old in zip(after, before, strict=True))
        before = after
        if calls:
            figures.append(
                Figure(
                    f"drafts.{setup}.accept_length_{clients}_streams", "tokens a verification",
                    total / calls, None, None, calls, higher_is_better=True, settings=settings,
                )
            )  # fmt: skip
    return figures


def _cases(model: Path, count: int) -> list[Case]:
    """Examples of all tasks in turn, so that every beginning of the list is a mix."""
    renderer = Renderer(model / "tokenizer.json")
    names = [name for name in EVALUATION if not name.endswith(_LONG)]
    each = -(-count // len(names)) + 1
    of_tasks = [build_cases(renderer, name, each) for name in names]
    return [task[index] for index in range(each) for task in of_tasks if index < len(task)][:count]


def _ask(server: Server, cases: Sequence[Case], clients: int) -> list[Reply]:
    return ask_all(server.url, [[case.body()] for case in cases], in_flight=clients)


def _accept_lengths(server: Server) -> tuple[int, int]:
    """Their sum and number so far."""
    time.sleep(_REPORT_S)
    name = "dsserve_spec_accept_length"
    return read_counter(server.url, f"{name}_sum"), read_counter(server.url, f"{name}_count")


if __name__ == "__main__":
    sys.exit(main())
