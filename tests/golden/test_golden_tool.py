"""The checker that came with the golden data, against the command `dsserve debug forward` as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKER = ROOT.parent / "shared" / "tools" / "check_golden.py"


@pytest.fixture
def checker() -> Path:
    if not CHECKER.is_file():
        pytest.skip(f"no golden checker at {CHECKER}")
    return CHECKER


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """The installed command, or the same entry point run from the source tree."""
    installed = Path(sys.executable).parent / "dsserve"
    if installed.is_file():
        return installed
    script = tmp_path / "dsserve"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dsserve.cli.main "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("level", ["released", "fp32"])
@pytest.mark.parametrize("checkpoint", ["golden_a", "golden_geom"])
def test_checker_passes(
    request: pytest.FixtureRequest, checker: Path, command: Path, checkpoint: str, level: str
) -> None:
    path: Path = request.getfixturevalue(checkpoint)
    arguments = ["--dsserve", str(command), "--ckpt", str(path), "--level", level]
    result = subprocess.run(
        [sys.executable, str(checker), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    failures = [line for line in result.stdout.splitlines() if not line.startswith("ok ")]
    assert result.returncode == 0, "\n".join(failures[-20:]) + result.stderr[-2000:]
