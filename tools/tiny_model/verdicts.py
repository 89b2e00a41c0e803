"""Which held-out examples were answered exactly: one line of a JSON file per row of the table, example by example."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from tools.tiny_model.render import Sample


@dataclass(slots=True)
class RowVerdicts:
    """One row of the table.

    Attributes:
        right: Whether each example was answered exactly, in the order of `held_out_samples`.
        examples: Checksum of each example's ids, so that two tables are compared on the same examples only.
    """

    right: list[bool] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Share of exact answers."""
        return sum(self.right) / max(len(self.right), 1)

    def add(self, sample: Sample, *, right: bool) -> None:
        """Append an example."""
        self.right.append(right)
        self.examples.append(checksum(sample))


def checksum(sample: Sample) -> int:
    """CRC-32 of the ids, prompt and reply."""
    return zlib.crc32(np.ascontiguousarray(sample.ids, dtype="<i4").tobytes())


def write_verdicts(file: Path, table: dict[str, RowVerdicts]) -> None:
    """Write a table, one row a line: `{name: {"score": .., "right": [..], "examples": [..]}}`."""
    lines = [
        f"{json.dumps(name)}: "
        + json.dumps({"score": row.score, "right": row.right, "examples": row.examples})
        for name, row in table.items()
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_verdicts(file: Path) -> dict[str, RowVerdicts]:
    """Read what `write_verdicts` wrote."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return {name: RowVerdicts(row["right"], row["examples"]) for name, row in content.items()}


def show_table(table: dict[str, RowVerdicts]) -> str:
    """One line per row."""
    return "\n".join(
        f"{name:20s} {row.score:.3f} of {len(row.right)}" for name, row in table.items()
    )
