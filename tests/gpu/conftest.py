"""Tests of this folder need a CUDA device; elsewhere each is skipped by name."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device")
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)
