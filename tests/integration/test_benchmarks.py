"""`python -m benchmarks` measures, and records machine, load, commit and failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dsserve._native", reason="the extension is not built")

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, *names: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks", *names, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (file,) = tmp_path.glob("*.json")
    return done, json.loads(file.read_text())


def test_run_writes_figures_with_their_circumstances(tmp_path: Path) -> None:
    done, record = run(tmp_path, "scheduler", "radix")
    assert done.returncode == 0, done.stderr
    assert record["failures"] == {}
    assert {"date", "commit", "dirty", "load_average", "machine"} <= set(record)
    assert {"cpu", "cores", "system", "python"} <= set(record["machine"])
    figures = {figure["name"]: figure for figure in record["figures"]}
    assert {"scheduler.decode.256.step", "radix.match_whole", "radix.match_half"} <= set(figures)
    for figure in figures.values():
        assert 0 < figure["p50"] <= figure["p99"]
        assert figure["met"] in (True, False, None)


def test_failed_benchmark_is_recorded_and_fails_the_run(tmp_path: Path) -> None:
    done, record = run(tmp_path, "no-such-benchmark")
    assert done.returncode == 1
    assert record["figures"] == []
    assert "no-such-benchmark" in record["failures"]
