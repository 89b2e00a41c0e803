"""What a measurement records: figures with percentiles, and the machine, load and commit they come from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = "dsserve.benchmarks/1"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity.

    Attributes:
        name: What was measured.
        unit: Unit of all values.
        value: The figure that is compared: the median, or a rate over the whole run.
        p50: Median of the samples; None for a single rate.
        p99: 99th percentile of the samples.
        count: Samples, or tokens for a rate.
        bar: Value to reach; None without one.
        higher_is_better: Whether `bar` is a minimum.
        settings: What was run.
    """

    name: str
    unit: str
    value: float
    p50: float | None
    p99: float | None
    count: int
    bar: float | None = None
    higher_is_better: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is reached; None without a bar."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.higher_is_better else self.value <= self.bar


def timing(
    name: str, samples_us: Sequence[float], *, bar_us: float | None, settings: dict[str, Any]
) -> Figure:
    """Return the figure of single timings in microseconds; its value is the median."""
    p50, p99 = (float(value) for value in np.percentile(samples_us, [50, 99]))
    return Figure(name, "us", p50, p50, p99, len(samples_us), bar=bar_us, settings=settings)


def write_record(figures: Sequence[Figure], failures: dict[str, str], folder: Path) -> Path:
    """Write one JSON file for a run; returns its path.

    Args:
        figures: All results.
        failures: Benchmark -> why it gave no result; a missing result is recorded, not left out.
        folder: Where to write.
    """
    now = datetime.datetime.now(datetime.UTC)
    commit, is_dirty = _commit()
    record = {
        "schema": SCHEMA,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": is_dirty,
        "machine": _machine(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "figures": [asdict(figure) | {"met": figure.is_met} for figure in figures],
        "failures": failures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{now:%Y%m%dT%H%M%SZ}-{commit[:9]}.json"
    file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return file


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _commit() -> tuple[str, bool | None]:
    """Return the commit and whether the tree differs from it; ("unknown", None) outside of git."""
    try:
        head = _git("rev-parse", "HEAD")
        return head, bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
