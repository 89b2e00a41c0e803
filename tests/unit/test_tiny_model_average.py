"""The mean of several runs of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tools.tiny_model.average import main, mean_masters
from tools.tiny_model.checkpoint import load_masters, save_masters

if TYPE_CHECKING:
    from pathlib import Path


def test_every_master_is_the_mean_over_the_runs(tmp_path: Path) -> None:
    runs = [{"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])} for _ in range(2)]
    runs[1] = {key: value * 3 for key, value in runs[0].items()}
    for number, run in enumerate(runs):
        save_masters(tmp_path / str(number), "target", run)
    assert main(["--masters", f"{tmp_path}/0", f"{tmp_path}/1", "--out", f"{tmp_path}/out"]) == 0
    mean = load_masters(tmp_path / "out", "target")
    assert mean["a"].tolist() == [2.0, 4.0]
    assert mean["b"].tolist() == [[6.0]]


def test_runs_of_different_architectures_have_no_mean() -> None:
    with pytest.raises(ValueError, match="different architectures"):
        mean_masters([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
