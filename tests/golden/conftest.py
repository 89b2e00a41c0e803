"""Where the golden checkpoints and their data lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Checkpoint A with its data is part of the repository.
GOLDEN_A = Path(__file__).resolve().parent / "data" / "v41-tiny-a"


@pytest.fixture(scope="session")
def golden_a() -> Path:
    """Checkpoint A: 12 layers, every layer kind, small heads."""
    return GOLDEN_A


@pytest.fixture(scope="session")
def golden_geom() -> Path:
    """Checkpoint G: the released attention geometry; kept outside of the repository for its size."""
    base = Path(os.environ.get("DSSERVE_GOLDEN") or ROOT.parent / "shared" / "golden")
    for folder in (base / "v41-tiny-a" / "geom", base / "geom"):
        if (folder / "golden.safetensors").is_file():
            return folder
    reason = f"no golden checkpoint G (v41-tiny-a/geom) under {base}: set DSSERVE_GOLDEN"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
