"""Every body of every operator: a row's result does not depend on its place, its mates or the size of the call."""

from __future__ import annotations

import itertools

import pytest
import torch

from dsserve_kernels.registry import REGISTRY
from kernel_cases import BODIES, CASES, run
from kernel_sources import Source

DTYPES = [torch.bfloat16, torch.float32]
ROWS = 70

each_body = pytest.mark.parametrize(("operator", "body"), BODIES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(operator: str, seed: int, dtype: torch.dtype, rows: int = ROWS) -> tuple:
    return CASES[operator].make(Source(seed), rows, dtype)


def assert_same(actual: tuple, expected: tuple) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_every_operator_has_a_case() -> None:
    assert sorted(CASES) == REGISTRY.operators()


@each_dtype
@each_body
def test_rows_in_another_order_give_the_same_bits(
    operator: str, body: str, dtype: torch.dtype
) -> None:
    for seed in range(4):
        rows = make(operator, seed, dtype)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
        whole = run(operator, body, rows)
        shuffled = run(operator, body, tuple(tensor[order] for tensor in rows))
        assert_same(shuffled, tuple(tensor[order] for tensor in whole))


@each_dtype
@each_body
def test_calls_split_at_random_give_the_same_bits(
    operator: str, body: str, dtype: torch.dtype
) -> None:
    for seed in range(4):
        rows = make(operator, seed, dtype)
        whole = run(operator, body, rows)
        cuts = torch.randint(0, ROWS + 1, (9,), generator=torch.Generator().manual_seed(seed))
        edges = [0, *sorted(cuts.tolist()), ROWS]  # some pieces are empty
        pieces = [
            run(operator, body, tuple(tensor[first:last] for tensor in rows))
            for first, last in itertools.pairwise(edges)
        ]
        assert_same(tuple(torch.cat(parts) for parts in zip(*pieces, strict=True)), whole)


@each_body
def test_single_rows_give_the_same_bits(operator: str, body: str) -> None:
    rows = make(operator, 5, torch.bfloat16, rows=20)
    whole = run(operator, body, rows)
    pieces = [run(operator, body, tuple(tensor[i : i + 1] for tensor in rows)) for i in range(20)]
    assert_same(tuple(torch.cat(parts) for parts in zip(*pieces, strict=True)), whole)


@each_dtype
@each_body
def test_no_rows_are_a_call_like_any_other(operator: str, body: str, dtype: torch.dtype) -> None:
    rows = make(operator, 1, dtype, rows=3)
    whole = run(operator, body, rows)
    nothing = run(operator, body, tuple(tensor[:0] for tensor in rows))
    for empty, full in zip(nothing, whole, strict=True):
        assert empty.shape == (0, *full.shape[1:])
        assert empty.dtype == full.dtype


@each_dtype
@pytest.mark.parametrize(("operator", "body"), [pair for pair in BODIES if pair[1] != "reference"])
def test_other_bodies_agree_with_the_reference(
    operator: str, body: str, dtype: torch.dtype
) -> None:
    rows = make(operator, 2, dtype)
    bound = 3e-3 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(
        run(operator, body, rows), run(operator, "reference", rows), strict=True
    ):
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        hidden = theirs.isinf()
        assert torch.equal(ours[hidden], theirs[hidden])
        ours, theirs = ours[~hidden], theirs[~hidden]
        distance = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert distance < bound


@each_body
def test_arguments_are_left_as_they_were(operator: str, body: str) -> None:
    rows = make(operator, 3, torch.float32)
    kept = [tensor.clone() for tensor in rows]
    [entry] = [entry for entry in REGISTRY.by_operator[operator] if entry.name == body]
    CASES[operator].call(entry.body, *rows)
    assert all(torch.equal(*pair) for pair in zip(rows, kept, strict=True))
