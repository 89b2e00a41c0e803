"""Fused bodies run few rows of wide weights themselves, and leave all else to their chains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsserve_kernels.attention import numpy_window
from dsserve_kernels.fused import numpy_attention, numpy_experts, numpy_streams
from dsserve_kernels.fused.values import FEW_ROWS, rotation_of, round_bf16, round_fp8
from dsserve_kernels.reference.quant import round_fp8_wide
from fused_cases import REFERENCE, fused
from kernel_cases import CASES, run
from kernel_sources import Source, shared

MODULES = {
    "sublayer_input": numpy_streams,
    "attention_input": numpy_attention,
    "attention_output": numpy_attention,
    "experts": numpy_experts,
    "window_attention": numpy_window,
}


def count_chain_calls(monkeypatch: pytest.MonkeyPatch, operator: str) -> list[str]:
    calls: list[str] = []
    chain = getattr(MODULES[operator].chains, operator)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(operator)
        return chain(*args, **kwargs)

    monkeypatch.setattr(MODULES[operator].chains, operator, counted)
    return calls


@pytest.mark.parametrize("operator", MODULES)
@pytest.mark.parametrize(
    ("rows", "dtype", "is_chain"),
    [
        (1, torch.bfloat16, False),
        (FEW_ROWS, torch.bfloat16, False),
        (FEW_ROWS + 1, torch.bfloat16, True),
        (1, torch.float32, True),
    ],
)
def test_few_rows_are_run_without_the_chain(
    monkeypatch: pytest.MonkeyPatch, operator: str, rows: int, dtype: torch.dtype, is_chain: bool
) -> None:
    calls = count_chain_calls(monkeypatch, operator)
    run(operator, "numpy", CASES[operator].make(Source(0), rows, dtype))
    # Cases with a second set of weights, which do not quantise activations, run the chain for that one.
    chains = 1 if operator in ("attention_input", "attention_output", "experts") else 0
    assert len(calls) == (chains + 1 if is_chain else chains)


def test_weights_that_are_kept_narrow_are_not_widened_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count_chain_calls(monkeypatch, "experts")
    narrow = replace(fused("experts"), w13=shared("w13").bfloat16(), prepared=None)
    x = Source(0).normal(2, shared("w13").shape[2], dtype=torch.bfloat16)
    ours = numpy_experts.experts(REFERENCE, x, narrow)
    assert calls == ["experts"]
    assert narrow.prepared is None
    wide = numpy_experts.experts(REFERENCE, x, fused("experts"))
    assert all(torch.equal(left, right) for left, right in zip(ours, wide, strict=True))


def test_bf16_rounding_is_that_of_torch_at_ties_and_beside_them() -> None:
    high = torch.arange(0x0080, 0x7780, 7, dtype=torch.int32)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = ((high.unsqueeze(1) << 16) | low).view(torch.float32).view(-1)
    values = torch.cat((values, -values, torch.zeros(1)))
    expected = values.bfloat16().float()
    assert torch.equal(torch.from_numpy(round_bf16(values.numpy())), expected)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-20, 1.0, 2.0**30])
def test_q8_without_quotients_is_that_of_the_reference(scale: float) -> None:
    rows = Source(1).normal(300, 64, scale=scale)
    rows[:, ::5] *= 2.0**-11
    rows[0] = 0
    rows[1, :32] = 448 * scale
    expected = round_fp8_wide(rows, torch.float64)
    assert torch.equal(torch.from_numpy(round_fp8(rows.numpy())), expected)


def test_the_same_table_rows_are_laid_out_once() -> None:
    first, second = shared("rope")[:3].clone(), shared("rope")[3:6].clone()
    assert rotation_of(first) is rotation_of(first)
    assert rotation_of(first) is not rotation_of(second)
