"""Attention over the union of a block's keys gives the bits of the reference, where each row copies its own keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dsserve_kernels.attention.numpy_attention import sparse_attention
from dsserve_kernels.attention.shared_keys import SharedKeys
from dsserve_kernels.reference.attention import sparse_attention as reference_attention
from kernel_sources import DIM, Source, pool

HEADS, WINDOW = 4, 24


def prompt_windows(rows: int, *, context: int) -> Tensor:
    """[rows, WINDOW] indices of a sliding window over `context` + `rows` keys, -1 before the first."""
    first = torch.arange(rows).unsqueeze(1) + context - WINDOW + 1
    index = first + torch.arange(WINDOW)
    return torch.where(index < 0, -1, index)


def arguments(rows: int, *, with_main: bool) -> dict[str, object]:
    source = Source(rows)
    context = 5
    chosen = source.picks(rows, 10, 40).sort(1).values
    # The first rows of a prompt see few compressed rows, the very first none.
    chosen = torch.where(chosen < torch.arange(rows).unsqueeze(1), chosen, -1)
    return {
        "q": source.normal(rows, HEADS, DIM, dtype=torch.bfloat16),
        "window_rows": source.normal(context + rows, DIM, dtype=torch.bfloat16),
        "window_index": prompt_windows(rows, context=context),
        "main_pool": pool("main") if with_main else None,
        "main_index": chosen if with_main else None,
        "sink": source.normal(HEADS),
        "scale": 0.125,
    }


@pytest.mark.parametrize("round_weights", [True, False])
@pytest.mark.parametrize("with_main", [True, False])
@pytest.mark.parametrize("rows", [16, 33, 150])
def test_rows_of_a_prompt_have_the_bits_of_the_reference(
    rows: int, with_main: bool, round_weights: bool
) -> None:
    values = arguments(rows, with_main=with_main) | {"round_weights": round_weights}
    assert torch.equal(sparse_attention(**values), reference_attention(**values))


def test_a_key_that_is_no_number_reaches_the_rows_that_have_it_alone() -> None:
    values = arguments(100, with_main=True) | {"round_weights": True}
    clean = sparse_attention(**values)
    broken = 60
    values["window_rows"] = values["window_rows"].clone()
    values["window_rows"][broken] = torch.nan
    result = sparse_attention(**values)
    has_it = (values["window_index"] == broken).any(1)
    assert has_it.sum() == WINDOW
    assert result[has_it].isnan().all()
    assert torch.equal(result[~has_it], clean[~has_it])


def test_rows_without_a_common_key_have_no_union() -> None:
    table = np.random.default_rng(0).normal(size=(32 * 20 + 1, 8))
    own = np.arange(32 * 20).reshape(32, 20)
    assert SharedKeys(table, num_heads=4).union(own) is None
    keys, bias = SharedKeys(table, num_heads=4).union(own[:1].repeat(32, 0))
    assert np.array_equal(keys, np.concatenate((table[:20], table[-1:])))
    assert (bias[:, :20] == 0).all()
    assert np.isneginf(bias[:, 20]).all()


def test_the_row_of_zeros_is_no_key() -> None:
    table = np.concatenate((np.ones((6, 4)), np.zeros((1, 4))))
    index = np.array([[0, 1, 6], [6, 6, 6]])
    keys, bias = SharedKeys(table, num_heads=4).union(index)
    assert len(keys) == 3
    assert np.array_equal(bias, [[0, 0, -np.inf], [-np.inf] * 3])
