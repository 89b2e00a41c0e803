"""The CUDA worker on a stand-in device: the tokens of the CPU worker, and never a wait while a step is launched."""

from __future__ import annotations

from typing import Any

import pytest

from device_stand_in import StandInDevice
from dsserve.worker.cuda_graphs import Bucket
from worker_drive import (
    Drive,
    asks,
    cpu_worker,
    device_worker,
    draft_worker,
    load,
    plain_asks,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return load("cuda")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = load("cpu")
    outputs = Drive(lambda capacity: cpu_worker(model, capacity)).run(asks())
    assert [len(ids) for ids in outputs] == [3, 5, 5, 5, 5, 4]
    assert outputs[5][-1] == 1, "the end token comes as soon as it may"
    return outputs


@pytest.mark.parametrize("buckets", [(), (Bucket(3, 512), Bucket(8, 80))], ids=["eager", "graphs"])
def test_the_device_worker_draws_the_tokens_of_the_cpu_worker(
    model: Any, expected: list[list[int]], buckets: tuple[Bucket, ...]
) -> None:
    device = StandInDevice()
    drive = Drive(lambda capacity: device_worker(model, device, capacity, buckets))
    assert drive.run(asks()) == expected
    assert device.num_captures == len(buckets)
    assert (drive.worker.num_replays > 0) == bool(buckets)


@pytest.mark.slow
def test_drafts_on_the_device_change_nothing(expected: list[list[int]]) -> None:
    model = load("cuda", draft=True)
    drive = Drive(lambda capacity: draft_worker(model, StandInDevice(), capacity), "DSPARK")
    assert drive.run(asks()) == expected


@pytest.mark.slow
def test_replayed_verify_steps_change_nothing(model: Any) -> None:
    without = Drive(lambda capacity: device_worker(model, StandInDevice(), capacity))
    drafting, device = load("cuda", draft=True), StandInDevice()
    buckets = [Bucket(2, 512), Bucket(4, 96)]
    drive = Drive(lambda capacity: draft_worker(drafting, device, capacity, buckets), "DSPARK")
    assert drive.run(plain_asks()) == without.run(plain_asks())
    assert device.num_captures == 2 * len(buckets)
    assert drive.worker.num_replays > 2
