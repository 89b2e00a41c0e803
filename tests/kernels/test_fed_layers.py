"""The check of layers on a device (`tests/gpu/test_layers_on_cuda.py`), held against a device that is the CPU.

With the bodies for CUDA as they are, all bits are equal. A rounding here and there passes; faults do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from layer_prompts import PROMPTS_A, PROMPTS_G, device_model, run_layers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from layer_checks import Judgement

#: Operators whose BF16 results are moved by an ulp here and there.
ROUNDED = ("rms_norm", "linear_fp8", "hc_expand")


def run(path: Path, prompt: str) -> Judgement:
    return run_layers(path, prompt, device_model(path, "cpu"), "cpu")


def wrap(
    patch: pytest.MonkeyPatch, path: Path, operator: str, change: Callable[[Any], Any]
) -> None:
    """Change what an operator of the device returns."""
    ops = device_model(path, "cpu").ops
    body = getattr(ops, operator)
    patch.setattr(ops, operator, lambda *args, **options: change(body(*args, **options)))


def flips(share: float) -> Callable[[Tensor], Tensor]:
    """Moves a share of BF16 numbers by an ulp, as a rounding that falls the other way."""
    generator = torch.Generator().manual_seed(11)

    def change(x: Tensor) -> Tensor:
        moved = torch.rand(x.shape, generator=generator)
        step = (moved < share / 2).to(torch.int16) - (moved > 1 - share / 2).to(torch.int16)
        bits = x.contiguous().view(torch.int16) + step
        return torch.where(x == 0, x, bits.view(x.dtype))

    return change


def check_equal(path: Path, prompt: str) -> None:
    found = run(path, prompt)
    assert found.failures == []
    assert found.swaps == []
    assert {errors.relative for errors in found.errors.values()} == {0.0}
    assert min(errors.of_rounding for errors in found.errors.values()) > 0.0


@pytest.mark.parametrize("prompt", PROMPTS_A)
def test_equal_bits_pass_on_checkpoint_a(golden_a: Path, prompt: str) -> None:
    check_equal(golden_a, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS_G)
def test_equal_bits_pass_on_checkpoint_g(golden_geom: Path, prompt: str) -> None:
    check_equal(golden_geom, prompt)


def check_rounding(patch: pytest.MonkeyPatch, path: Path, prompt: str) -> None:
    for operator in ROUNDED:
        wrap(patch, path, operator, flips(1e-4))
    found = run(path, prompt)
    assert found.failures == []
    assert max(errors.relative for errors in found.errors.values()) > 0.0


@pytest.mark.parametrize("prompt", PROMPTS_A)
def test_roundings_pass_on_checkpoint_a(
    golden_a: Path, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    check_rounding(monkeypatch, golden_a, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS_G)
def test_roundings_pass_on_checkpoint_g(
    golden_geom: Path, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    check_rounding(monkeypatch, golden_geom, prompt)


def test_choices_that_differ_by_rounding_are_counted(
    golden_a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for operator in ROUNDED:
        wrap(monkeypatch, golden_a, operator, flips(1e-3))
    found = run(golden_a, "len100")
    assert found.failures == []
    assert {swap.what for swap in found.swaps} >= {"topk"}
    assert all(0 <= swap.num_roundings < 4 for swap in found.swaps)


def second_best(chosen: Tensor) -> Tensor:
    """Positions of `topk_rows` with the first replaced by one that was not chosen, in one row."""
    changed = chosen.clone()
    free = set(range(chosen.shape[1] + 1)) - set(chosen[-1].tolist())
    changed[-1, 0] = min(free)
    return changed.sort(1).values


FAULTS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "streams two percent too large": ("hc_expand", lambda x: x * 1.02, "stream relative error"),
    "a position that is far from the best": ("topk_rows", second_best, "what='topk'"),
    "scores of the next key": ("index_scores", lambda x: x.roll(1, 1), "index_scores"),
    "queries of the index an eighth too large": (
        "round_fp4_index",
        lambda x: x * 1.125,
        "index_scores",
    ),
    "other candidate blocks": ("candidate_mask", lambda m: m.roll(4, 1), "what='blocks'"),
    "rotation left out": ("rope", lambda x: x.roll(1, -1), "relative error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_fail(golden_a: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    operator, change, expected = FAULTS[fault]
    wrap(monkeypatch, golden_a, operator, change)
    assert any(expected in failure for failure in run(golden_a, "len100").failures)


def test_a_router_without_its_bias_fails(golden_a: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = device_model(golden_a, "cpu").ops
    body = ops.route_experts
    monkeypatch.setattr(
        ops, "route_experts", lambda x, weight, bias, **rest: body(x, weight, bias * 0, **rest)
    )
    assert any("what='experts'" in failure for failure in run(golden_a, "len100").failures)


def test_rows_that_are_stored_elsewhere_fail(
    golden_a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer reads its new rows directly; only the pool shows where they went."""
    ops = device_model(golden_a, "cpu").ops
    body = ops.store_window_rows

    def store(pool: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        kept: Tensor = body(pool, torch.where(index >= 0, index.roll(1), index), rows)
        return kept

    monkeypatch.setattr(ops, "store_window_rows", store)
    failures = run(golden_a, "len64").failures
    assert any("window relative error" in failure for failure in failures)
    assert not any("stream" in failure for failure in failures)
