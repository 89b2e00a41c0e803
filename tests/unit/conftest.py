"""Unit tests do not depend on the settings of whoever runs them."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    """Take away variables that stand for flags or for a client's server."""
    for name in list(os.environ):
        is_setting = name.startswith("DSSERVE_") and name != "DSSERVE_GOLDEN"
        if is_setting or name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
            monkeypatch.delenv(name)
