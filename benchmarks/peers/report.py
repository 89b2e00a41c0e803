"""The comparison as a Markdown table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.rows import OURS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.rows import Row, Rows

RATIO = "times"


def markdown(rows: Rows, loads: Sequence[str], left_out: Sequence[str]) -> str:
    """Return a table with a line a workload: ours, the bar, and every peer with its ratio to ours."""
    lines = [
        f"Load average (1 minute): {', '.join(loads)}. CPU time; median of the rounds (minimum-maximum);",
        "`x` is the peer's time over ours.",
        "",
        "| workload | unit | dsserve | at most | peers |",
        "| --- | --- | --- | --- | --- |",
    ]
    by_workload: dict[str, list[Row]] = {}
    for row in rows.all():
        by_workload.setdefault(row.workload, []).append(row)
    for workload, group in by_workload.items():
        ours = rows.ours(workload)
        peers = "; ".join(_peer(row, ours) for row in group if row.implementation != OURS)
        cells = [
            workload,
            group[0].unit,
            "-" if ours is None else _spread(ours),
            _bar(ours),
            peers or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\nLeft out: {reason}" for reason in left_out]
    return "\n".join(lines) + "\n"


def _bar(ours: Row | None) -> str:
    if ours is None or ours.bar is None:
        return "-"
    return f"{_number(ours.bar)} {'met' if ours.value <= ours.bar else 'MISSED'}"


def _peer(row: Row, ours: Row | None) -> str:
    ratio = ""
    if row.unit != RATIO and ours is not None and ours.value > 0 and row.value > 0:
        ratio = f", x{_ratio(row.value / ours.value)}"
    return f"{row.implementation} {_spread(row)}{ratio}"


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _spread(row: Row) -> str:
    if len(row.rounds) == 1:
        return _number(row.value)
    return f"{_number(row.value)} ({_number(min(row.rounds))}-{_number(max(row.rounds))})"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
