"""Every operator chosen for CUDA against the reference on the CPU, without a wait for the device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import kernel_cases
from dsserve.worker.cuda_device import no_waiting
from dsserve.worker.tensor_tree import map_tensors
from dsserve_kernels.registry import REGISTRY
from dsserve_kernels.select import select_operators
from dsserve_kernels.torch_device.tables import place_tables
from fused_cases import FUSED_CASES

#: Results that must be equal bit for bit (kernels.md section 5).
EXACT = {
    *("accept_draws", "allocate_drafts", "candidate_mask", "engram_gather", "engram_hash"),
    *("load_index_rows", "load_main_rows", "load_window_rows", "round_fp4_index"),
    *("round_fp4_main", "round_fp8", "rope", "topk_rows"),
}
STORES = {"store_window_rows": "window", "store_main_rows": "main", "store_index_rows": "index"}
#: A fused operator is on CUDA the chain of these operators, each of which is here.
OPERATORS = sorted(set(kernel_cases.CASES) - set(STORES) - set(FUSED_CASES))
#: Relative distance of everything else: one BF16 rounding that falls the other way in a few places.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float32: 2e-6}
ROWS = 33


def on_device(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.cuda())


@pytest.fixture(autouse=True)
def shared_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all rows share is on the CPU for the reference, on the device for the body under test."""
    place_tables(torch.device("cuda"))
    shared, pool = kernel_cases.shared, kernel_cases.pool
    state = {"device": False}
    copies: dict[Any, Any] = {}

    def copy(get: Any, name: str) -> Any:
        if not state["device"]:
            return get(name)
        key = (get, name)
        if key not in copies:
            copies[key] = get(name).cuda()
        return copies[key]

    monkeypatch.setattr(kernel_cases, "shared", lambda name: copy(shared, name))
    monkeypatch.setattr(kernel_cases, "pool", lambda kind: copy(pool, kind))
    monkeypatch.setattr(kernel_cases, "_on_device", state, raising=False)


def call(operator: str, body: Any, rows: Any, *, device: bool) -> tuple[Any, ...]:
    kernel_cases._on_device["device"] = device
    result = kernel_cases.CASES[operator].call(body, *rows)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("numerics", ["released", "fp32"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operator_agrees_with_the_reference(operator: str, numerics: str) -> None:
    body = getattr(select_operators("cuda", numerics), operator)
    oracle = getattr(select_operators("cpu", numerics), operator)
    dtype = torch.bfloat16 if numerics == "released" else torch.float32
    rows = kernel_cases.CASES[operator].make(kernel_cases.Source(5), ROWS, dtype)
    expected = call(operator, oracle, rows, device=False)
    placed = on_device(list(rows))
    call(operator, body, placed, device=True)
    is_free = operator in ("sample", "allocate_drafts")  # their cases make numbers on the way
    with contextlib.nullcontext() if is_free else no_waiting(is_on=True):
        ours = call(operator, body, placed, device=True)
    torch.cuda.synchronize()
    for left, right in zip(ours, expected, strict=True):
        left = left.cpu()
        assert left.dtype == right.dtype
        if operator in EXACT or not right.is_floating_point():
            same = (left == right) | ((left != left) & (right != right))
            assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"
        else:
            finite = torch.isfinite(right)
            assert torch.equal(finite, torch.isfinite(left))
            left, right = left[finite].double(), right[finite].double()
            distance = float((left - right).norm() / right.norm().clamp_min(1e-30))
            assert distance < TOLERANCE[dtype], distance


@pytest.mark.parametrize("operator", sorted(STORES))
def test_rows_are_stored_bit_for_bit(operator: str) -> None:
    width = kernel_cases.ROW_BYTES[STORES[operator]]
    index, rows = kernel_cases.CASES[operator].make(kernel_cases.Source(8), ROWS, torch.bfloat16)
    [reference] = [b.body for b in REGISTRY.by_operator[operator] if b.name == "reference"]
    expected = torch.full((80, width), 0xFF, dtype=torch.uint8)
    reference(expected, index, rows)
    pool = torch.full((80, width), 0xFF, dtype=torch.uint8).cuda()
    placed_index, placed_rows = index.cuda(), rows.cuda()
    with no_waiting(is_on=True):
        getattr(select_operators("cuda", "released"), operator)(pool, placed_index, placed_rows)
    assert torch.equal(pool.cpu(), expected)


def test_the_guard_sees_a_wait() -> None:
    numbers = torch.arange(3, device="cuda")
    with no_waiting(is_on=True), pytest.raises(RuntimeError):
        numbers.sum().item()
    assert int(numbers.sum()) == 3


def test_a_device_product_is_no_tf32_product() -> None:
    x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    exact = x.double() @ x.double().T
    assert float((x @ x.T - exact).norm() / exact.norm()) < 1e-5
