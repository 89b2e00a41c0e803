"""The peer comparison runs our side of every workload, and compares implementations that agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("dsserve._native", reason="the extension is not built")

from benchmarks.peers import prefix, suite
from benchmarks.peers.report import markdown
from benchmarks.peers.rows import OURS, Rows
from benchmarks.peers.sizes import TINY
from benchmarks.peers.trees import CacheKind, OurCache, our_kinds


def test_our_side_of_every_suite_gives_a_value_for_every_workload() -> None:
    rows, loads, left_out = suite.run(suite.SUITES, TINY, only_ours=True)
    assert left_out == []
    assert [load.split()[0] for load in loads] == list(suite.SUITES)
    workloads = {row.workload for row in rows.all()}
    assert {
        "memory a cached token",
        "chat match",
        "chat match + insert, window",
        "sysmix match",
        "evict 512 + match + insert, 32 leaves",
        "window on top, chat match + insert",
        "evict, most leaves over least",
        "decode step, 4 running",
        "arrival of 2K, 4 running",
        "mixed step, 4 running + 2K",
        "encode, 1K prompts",
        "detokenise 8 streams",
    } <= workloads
    for row in rows.all():
        assert row.implementation.startswith(OURS)
        assert row.value > 0 or row.workload.startswith(("mixed over", "memory")), row
    table = markdown(rows, loads, left_out)
    assert all(f"| {workload} |" in table for workload in workloads)


def test_peer_has_its_ratio_to_ours() -> None:
    rows = Rows()
    for value in (2.0, 4.0, 3.0):
        rows.add("work", "us", OURS, value, bar=2.5)
        rows.add("work", "us", "Peer", 2 * value, bar=2.5)
    ours, peer = rows.all()
    figure = peer.figure(ours)
    assert (figure.value, figure.bar) == (6.0, None)
    assert figure.settings["times_dsserve"] == 2.0
    assert (figure.settings["min"], figure.settings["max"]) == (4.0, 8.0)
    assert ours.figure(ours).is_met is False
    assert (
        "| work | us | 3.00 (2.00-4.00) | 2.50 MISSED | Peer 6.00 (4.00-8.00), x2.0 |"
        in markdown(rows, [], [])
    )


def test_caches_that_find_other_prefixes_are_not_compared() -> None:
    class Forgetful(OurCache):
        def cached_len(self, found: Any) -> int:
            return max(0, super().cached_len(found) - 64)

    kinds = [*our_kinds(), CacheKind("Forgetful", Forgetful)]
    sizes = replace(TINY, sysmix_prompts=2, leaves=(), memory_prompts=1)
    with pytest.raises(RuntimeError, match="Forgetful found other prefixes"):
        prefix.measure(kinds, sizes, Rows())
