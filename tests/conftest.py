"""Fixtures for tests of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dsserve.cli.default_model import embedded_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def embedded_checkpoint() -> Path:
    """The trained model that the package ships: what it answers means something."""
    return embedded_model()
