"""The table for the terminal, for the model card, and the JSON file with every wrong case."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from tools.tiny_model.served.results import Findings, Result
    from tools.tiny_model.served.rows import RowSpec

SCHEMA = "dsserve.tiny_eval/1"
#: The table of a document stands between these.
BEGIN, END = "<!-- scores: written by make eval-tiny -->", "<!-- end of scores -->"


def line(result: Result) -> str:
    """One row as a line of progress."""
    verdict = "" if result.passed else "  BELOW"
    note = result.broken or result.note
    return (
        f"{result.spec.name:26s} {_show(result.spec, result.score):>7s} of {result.count:3d}{verdict}"
        f"{f'  ({note})' if note else ''}"
    )


def rich_table(results: list[Result]) -> Table:
    """The table for the terminal."""
    table = Table(title="dsserve-tiny through the HTTP API, greedy, held-out examples")
    table.add_column("row")
    for name in ("count", "score", "at least", "aim"):
        table.add_column(name, justify="right")
    table.add_column("result")
    table.add_column("note")
    for result in results:
        word, colour = ("pass", "green") if result.passed else ("FAIL", "red")
        table.add_row(*_cells(result), f"[{colour}]{word}[/]", result.broken or result.note)
    return table


def markdown_table(results: list[Result]) -> str:
    """The table for the model card."""
    lines = ["| row | examples | score | at least | aim |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(_cells(result))} |" for result in results]
    return "\n".join(lines) + "\n"


def write_markdown(file: Path, results: list[Result]) -> None:
    """Write the table, into its place where the file is a document that has one."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    table = markdown_table(results)
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if end:
        table = f"{before}{begin}\n{table}{end}{after}"
    file.write_text(table, encoding="utf-8")


def write_json(file: Path, findings: Findings, settings: dict[str, Any]) -> None:
    """Everything that was found, with each wrong case: its request, what was expected, what came."""
    content = {
        "schema": SCHEMA,
        "settings": settings,
        "rows": [result.to_dict() for result in findings.results],
        "wrong": [each.to_dict() for each in findings.wrong],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _cells(result: Result) -> tuple[str, ...]:
    aim = "" if result.aim is None else _show(result.spec, result.aim)
    score = _show(result.spec, result.score)
    if result.base is not None:
        score += f" (base {_show(result.spec, result.base)})"
    return (
        result.spec.name, str(result.count), score, _show(result.spec, result.threshold), aim,
    )  # fmt: skip


def _show(spec: RowSpec, value: float) -> str:
    return f"{value:.2f}" if spec.is_length else f"{100 * value:.1f} %"
