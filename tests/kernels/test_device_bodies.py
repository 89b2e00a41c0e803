"""Bodies for CUDA, run on CPU tensors: they give the bits of the reference, and never ask what is in a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsserve_kernels.registry import REGISTRY
from dsserve_kernels.torch_device import experts
from kernel_cases import CASES, run
from kernel_sources import Source

BODIES = sorted(
    name
    for name, bodies in REGISTRY.by_operator.items()
    if any(body.name == "torch" for body in bodies)
)
#: Operators that on CUDA wait for the device, because their result's size or a number of the host depends on data.
WAITS = (
    "nonzero",
    "_local_scalar_dense",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "equal",
)


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITS:
            raise AssertionError(f"{name} waits for the device")
        if name in ("index", "index_put_", "_index_put_impl_", "index_put"):
            for index in args[1]:
                assert index is None or index.dtype not in (torch.bool, torch.uint8), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operator", BODIES)
@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_device_bodies_give_the_bits_of_the_reference(
    operator: str, rows: int, dtype: torch.dtype
) -> None:
    for seed in range(3):
        arguments = CASES[operator].make(Source(seed), rows, dtype)
        ours, theirs = (run(operator, body, arguments) for body in ("torch", "reference"))
        for left, right in zip(ours, theirs, strict=True):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)


@pytest.mark.parametrize("operator", BODIES)
def test_device_bodies_do_not_wait(operator: str) -> None:
    arguments = CASES[operator].make(Source(0), 7, torch.bfloat16)
    with NoWaiting():
        run(operator, "torch", arguments)


def test_the_guard_of_these_tests_sees_a_boolean_index() -> None:
    with NoWaiting(), pytest.raises(AssertionError):
        torch.arange(3)[torch.tensor([True, False, True])]


def test_experts_of_many_rows_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = CASES["moe_routed"].make(Source(3), 33, torch.bfloat16)
    whole = run("moe_routed", "torch", arguments)[0]
    monkeypatch.setattr(experts, "MAX_PRODUCTS", 4 * 8 * 64)
    assert torch.equal(run("moe_routed", "torch", arguments)[0], whole)


@pytest.mark.parametrize("operator", ["store_window_rows", "store_main_rows", "store_index_rows"])
def test_dropped_rows_leave_the_pool_alone(operator: str) -> None:
    rows = Source(1).normal(5, 64, dtype=torch.bfloat16)
    for index in ([-1, -1, -1, -1, -1], [-1, 0, -1, 7, -1], [3, -1, 4, 5, 0]):
        pools = []
        for name in ("torch", "reference"):
            [body] = [b.body for b in REGISTRY.by_operator[operator] if b.name == name]
            width = {"store_window_rows": 66, "store_main_rows": 36, "store_index_rows": 34}
            pool = Source(2).ints(0, 256, 9, width[operator]).to(torch.uint8)
            body(pool, torch.tensor(index), rows)
            pools.append(pool)
        assert torch.equal(*pools)
