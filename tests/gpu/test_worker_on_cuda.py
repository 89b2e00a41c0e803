"""The CUDA worker on a device, two steps in flight, every wait while a step is launched an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dsserve.worker.cuda_device import CudaDevice
from dsserve.worker.cuda_graphs import Bucket
from verify_runs import KnownDrafts, limited_asks, unlike_asks
from worker_drive import (
    Drive,
    asks,
    cpu_worker,
    device_worker,
    draft_worker,
    load,
    plain_asks,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_drive import Ask


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(is_guarded=True)


@pytest.fixture(scope="module")
def model(device: CudaDevice) -> Any:
    return load("cuda", "fp32", device.torch_device)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = load("cpu", "fp32")
    return Drive(lambda capacity: cpu_worker(model, capacity)).run(asks())


@pytest.mark.parametrize("buckets", [(), (Bucket(3, 512), Bucket(8, 512))], ids=["eager", "graphs"])
def test_the_worker_draws_the_tokens_of_the_cpu_worker_and_never_waits(
    device: CudaDevice, model: Any, expected: list[list[int]], buckets: tuple[Bucket, ...]
) -> None:
    drive = Drive(lambda capacity: device_worker(model, device, capacity, buckets))
    ours = drive.run(asks())
    same = [left == right for left, right in zip(ours, expected, strict=True)]
    assert [len(ids) for ids in ours] == [len(ids) for ids in expected]
    # A stored code that flips on a difference of 1e-7 may change a token of a long prompt.
    assert sum(same) >= len(same) - 1, (ours, expected)
    assert (drive.worker.num_replays > 0) == bool(buckets)


@pytest.mark.parametrize("buckets", [(), (Bucket(2, 512), Bucket(4, 512))], ids=["eager", "graphs"])
def test_drafts_change_nothing(device: CudaDevice, model: Any, buckets: tuple[Bucket, ...]) -> None:
    without = Drive(lambda capacity: device_worker(model, device, capacity)).run(plain_asks())
    drafting = load("cuda", "fp32", device.torch_device, draft=True)
    drive = Drive(lambda capacity: draft_worker(drafting, device, capacity, buckets), "DSPARK")
    ours = drive.run(plain_asks())
    assert ours == without
    assert drive.num_verify_steps > 0
    assert drive.worker.num_replays == (drive.num_verify_steps if buckets else 0)


@pytest.mark.parametrize("make_asks", [limited_asks, unlike_asks])
def test_steps_of_cut_blocks_are_replayed(
    device: CudaDevice, model: Any, make_asks: Callable[[], list[Ask]]
) -> None:
    asks = make_asks()
    without = Drive(lambda capacity: device_worker(model, device, capacity)).run(
        [replace(ask, draft_len=None) for ask in asks]
    )
    drafting = load("cuda", "fp32", device.torch_device, draft=True)
    draft, buckets = KnownDrafts(asks, without, device.torch_device), [Bucket(8, 512)]
    drive = Drive(
        lambda capacity: draft_worker(drafting, device, capacity, buckets, draft), "DSPARK"
    )
    ours = drive.run(asks)
    assert drive.worker.num_replays == drive.num_verify_steps > 0
    assert [len(ids) for ids in ours] == [ask.count for ask in asks]
    same = [left == right for left, right in zip(ours, without, strict=True)]
    assert sum(same) >= len(same) - 1, (ours, without)
