"""What do drafts bring on this machine? Accept length and tokens a second of the embedded model, with DSpark and without.

Greedy chat requests of its own tasks (held-out examples of one context of 256 tokens and all short tasks), sent by 1, 8 and
32 clients at a time. Tokens a second are all tokens of the replies over the time from the first request to the last reply.
"""

from __future__ import annotations

import time
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
    from collections.abc import Sequence

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
    cases = _cases(max(REQUESTS.values()))
    figures = []
    for setup, flags in SETUPS.items():
        with running_server(model=NAME, flags=flags) as server:
            figures += _measure_setup(server, setup, flags, cases)
    return figures


def _measure_setup(
    server: Server, setup: str, flags: tuple[str, ...], cases: Sequence[Case]
) -> list[Figure]:
    _ask(server, cases[:8], 8)
    figures = []
    for clients, count in REQUESTS.items():
        settings = {"checkpoint": NAME, "flags": " ".join(flags), "clients": clients}
        before = _accept_lengths(server)
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
        total, calls = (
            after - earlier for after, earlier in zip(_accept_lengths(server), before, strict=True)
        )
        if calls:
            figures.append(
                Figure(
                    f"drafts.{setup}.accept_length_{clients}_streams", "tokens a verification",
                    total / calls, None, None, calls, higher_is_better=True, settings=settings,
                )
            )  # fmt: skip
    return figures


def _cases(count: int) -> list[Case]:
    """Examples of all tasks in turn, so that every beginning of the list is a mix."""
    renderer = Renderer(embedded_model() / "tokenizer.json")
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
