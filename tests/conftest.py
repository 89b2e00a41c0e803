"""Fixtures for tests of every kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsserve.cli.default_model import embedded_model

TESTS = Path(__file__).resolve().parent
#: Checkpoint A with its data is part of the repository; a bundle for a GPU machine puts G beside it.
GOLDEN = TESTS / "golden" / "data"


@pytest.fixture(scope="session")
def embedded_checkpoint() -> Path:
    """The trained model that the package ships: what it answers means something."""
    return embedded_model()


@pytest.fixture(scope="session")
def golden_a() -> Path:
    """Checkpoint A: 12 layers, every layer kind, small heads."""
    return GOLDEN / "v41-tiny-a"


@pytest.fixture(scope="session")
def golden_geom() -> Path:
    """Checkpoint G: the released attention geometry; kept outside of the repository for its size."""
    base = Path(os.environ.get("DSSERVE_GOLDEN") or TESTS.parents[1] / "shared" / "golden")
    for folder in (base / "v41-tiny-a" / "geom", base / "geom", GOLDEN / "geom"):
        if (folder / "golden.safetensors").is_file():
            return folder
    reason = f"no golden checkpoint G (v41-tiny-a/geom) under {base}: set DSSERVE_GOLDEN"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
