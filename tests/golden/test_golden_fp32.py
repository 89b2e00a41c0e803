"""`--numerics fp32` against `golden_fp32.safetensors`: the file for correctness; gates of the golden README."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from golden_runs import Run, equal_rows, golden, keys_of, logit_stats, output, pair, runs_of

if TYPE_CHECKING:
    from pathlib import Path

#: Golden logits of A -> bound of the median over rows of the largest difference.
MEDIANS_A = {
    "len17.logits": 0.001,
    "len33.logits": 0.001,
    "len100.logits": 0.1,
    "len33.dense.logits": 0.001,
    "len100.dense.logits": 0.1,
    "len17.greedy.logits": 0.1,
    "len64.greedy.logits": 0.1,
}
MEDIANS_G = {
    "len129.logits": 0.01,
    "len300.logits": 0.01,
    "len129.dense.logits": 0.01,
    "len129.greedy.logits": 0.01,
}
ARGMAX = 0.98
#: Shares of rows with the same choice, and relative errors of streams and mixes.
CHOICE, STREAM = 0.95, 1e-3


def check_logits(path: Path, key: str, bound: float) -> None:
    name = key.removesuffix(".greedy.logits").removesuffix(".logits")
    prompt, _, mode = name.partition(".")
    out = output(path, "fp32", Run(prompt, mode or "full"))
    stats = logit_stats(*pair(path, "fp32", key, out))
    assert stats.median < bound, stats
    assert stats.argmax_equal >= ARGMAX, stats


@pytest.mark.parametrize("key", MEDIANS_A)
def test_logits_of_checkpoint_a_are_within_tolerance(golden_a: Path, key: str) -> None:
    check_logits(golden_a, key, MEDIANS_A[key])


@pytest.mark.parametrize("key", MEDIANS_G)
def test_logits_of_checkpoint_g_are_within_tolerance(golden_geom: Path, key: str) -> None:
    check_logits(golden_geom, key, MEDIANS_G[key])


@pytest.mark.parametrize("prompt", ["len17", "len64"])
def test_greedy_tokens_of_checkpoint_a_are_equal(golden_a: Path, prompt: str) -> None:
    expected, ours = pair(
        golden_a, "fp32", f"{prompt}.greedy.tokens", output(golden_a, "fp32", Run(prompt))
    )
    assert (expected == ours).double().mean() >= CHOICE


def test_greedy_tokens_of_checkpoint_g_are_equal(golden_geom: Path) -> None:
    expected, ours = pair(
        golden_geom, "fp32", "len129.greedy.tokens", output(golden_geom, "fp32", Run("len129"))
    )
    assert (expected == ours).double().mean() >= CHOICE


def choices_below(path: Path, run: Run) -> dict[str, float]:
    keys = [key for key in keys_of(path, "fp32", run) if key.endswith(("topk", "route_ids"))]
    assert keys
    out = output(path, "fp32", run)
    shares = {key: equal_rows(*pair(path, "fp32", key, out)) for key in keys}
    return {key: share for key, share in shares.items() if share < CHOICE}


@pytest.mark.parametrize("prompt", ["len17", "len33", "len100"])
def test_choices_of_checkpoint_a_are_equal(golden_a: Path, prompt: str) -> None:
    assert choices_below(golden_a, Run(prompt)) == {}


@pytest.mark.parametrize("prompt", ["len129", "len300"])
def test_choices_of_checkpoint_g_are_equal(golden_geom: Path, prompt: str) -> None:
    assert choices_below(golden_geom, Run(prompt)) == {}


@pytest.mark.parametrize("kind", ["stream", "next_pre"])
def test_streams_of_every_layer_of_checkpoint_a_are_equal(golden_a: Path, kind: str) -> None:
    run = Run("len33")
    out = output(golden_a, "fp32", run)
    keys = [key for key in keys_of(golden_a, "fp32", run) if key.endswith(kind)]
    assert len(keys) == 12
    errors = {}
    for key in keys:
        expected, ours = pair(golden_a, "fp32", key, out)
        errors[key] = float((expected - ours).norm() / expected.norm())
    assert {key: error for key, error in errors.items() if error >= STREAM} == {}


def test_chunks_of_checkpoint_a_are_as_near_as_the_whole(golden_a: Path) -> None:
    for chunk in (16, 33, 64):
        out = output(golden_a, "fp32", Run("len100"), chunk, greedy=False)
        stats = logit_stats(*pair(golden_a, "fp32", "len100.logits", out))
        assert stats.median < MEDIANS_A["len100.logits"], (chunk, stats)
        assert stats.argmax_equal >= ARGMAX, (chunk, stats)


def test_no_golden_tensor_is_left_out(golden_a: Path) -> None:
    names = [f"len{n}" for n in (17, 33, 64, 100)]
    runs = {Run(name) for name in names} | {Run("len33", "dense"), Run("len100", "dense")}
    assert runs_of(golden_a, "fp32") == runs
    kinds = {key.rsplit(".", 1)[1] for run in runs for key in keys_of(golden_a, "fp32", run)}
    assert kinds == {"logits", "tokens", "topk", "route_ids", "stream", "next_pre"}
    logits = {key for key in golden(golden_a, "fp32") if key.endswith(".logits")}
    assert logits == set(MEDIANS_A)
