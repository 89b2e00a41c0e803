"""Staging, results by event, the clock of a stream and the guard of the CUDA worker, on a stand-in device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from device_stand_in import StandInDevice, WaitedError
from dsserve.errors import ConfigError
from dsserve.worker import cuda_device
from dsserve.worker.cuda_device import CudaDevice, no_waiting
from dsserve.worker.cuda_staging import StagingRing, download, packed_bytes
from dsserve.worker.cuda_step import CudaStep, DeviceClock, DrawnIds
from dsserve.worker.tensor_tree import map_tensors, tensors_of


@dataclass(frozen=True)
class Inner:
    rows: Tensor
    by_ratio: dict[int, Tensor]


@dataclass(frozen=True)
class Outer:
    first: Inner
    second: Inner
    count: int
    maybe: Tensor | None


def some(size: int, *, shared: bool = False) -> Outer:
    first = Inner(torch.arange(size), {2: torch.rand(3, size), 1: torch.zeros(0, 4)})
    second = first if shared else Inner(torch.ones(size, dtype=torch.bool), {})
    return Outer(first, second, 7, None)


def assert_same(left: Outer, right: Outer) -> None:
    pairs = list(zip(tensors_of(left), tensors_of(right), strict=True))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    assert left.count == right.count
    assert left.maybe is right.maybe is None


def test_a_nested_value_arrives_whole() -> None:
    ring = StagingRing(StandInDevice(), 3, capacity=64)
    for size in (1, 5, 300, 2):
        value = some(size)
        assert_same(ring.upload(value), value)


def test_what_is_one_object_stays_one_object() -> None:
    placed = StagingRing(StandInDevice(), 3).upload(some(4, shared=True))
    assert placed.first is placed.second
    assert len(tensors_of(placed)) == 3
    changed = map_tensors(placed, torch.clone)
    assert changed.first is changed.second


def test_inputs_of_a_graph_keep_their_place_whatever_they_hold() -> None:
    ring = StagingRing(StandInDevice(), 3)
    memory = torch.zeros(packed_bytes(some(9)), dtype=torch.uint8)
    first = ring.upload(some(9), memory)
    other = replace(some(9), first=Inner(torch.full((9,), 5), some(9).first.by_ratio))
    second = ring.upload(other, memory)
    assert [t.data_ptr() for t in tensors_of(first)] == [t.data_ptr() for t in tensors_of(second)]
    assert first.first.rows.tolist() == [5] * 9


def test_a_buffer_is_written_again_only_when_its_copy_is_done() -> None:
    device = StandInDevice(holds_events=True)
    ring = StagingRing(device, 2)
    with device.launching():
        ring.upload(some(3))
        ring.upload(some(3))
        with pytest.raises(WaitedError):
            ring.upload(some(3))
    ring.upload(some(3))


def test_results_come_back_as_they_were() -> None:
    value = some(6)
    memory = torch.zeros(packed_bytes(value), dtype=torch.uint8)
    assert_same(download(value, memory), value)


def step(device: StandInDevice, clock: DeviceClock, drawn: list[list[int]]) -> CudaStep:
    samples = np.array([True, False, True])
    started, finished = device.event(), device.event()
    started.record()
    finished.record()
    return CudaStep(started, finished, DrawnIds(4, samples, torch.tensor(drawn)), clock)


def test_a_step_is_done_when_its_event_is_passed() -> None:
    device = StandInDevice(holds_events=True)
    handle = step(device, DeviceClock(), [[11, 0], [12, 1]])
    assert not handle.done()
    assert not handle.wait_done(0.0)
    handle.started.is_passed = handle.finished.is_passed = True
    assert handle.wait_done(0.0)
    result = handle.wait()
    assert result.token_ids.tolist() == [11, -1, 12]
    assert result.status.tolist() == [0, 0, 1]
    assert handle.wait() is result


def test_waiting_ends_a_step() -> None:
    device = StandInDevice(holds_events=True)
    handle = step(device, DeviceClock(), [[1, 0], [2, 0]])
    handle.started.is_passed = True
    assert handle.wait().token_ids.tolist() == [1, -1, 2]
    assert handle.done()


class Passed:
    """An event that was passed at a time."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_time(self, end_event: Any) -> float:
        return (end_event.at_s - self.at_s) * 1e3


def test_times_of_steps_are_those_of_the_device_however_late_the_host_looks() -> None:
    now_s = [100.0]
    clock = DeviceClock(lambda: now_s[0])
    # The device's own clock begins elsewhere; the host sees the first step end.
    first = clock.interval(Passed(0.0), Passed(0.010), has_waited=True)
    assert first == pytest.approx((99.990, 100.0))
    now_s[0] = 100.5
    second = clock.interval(Passed(0.012), Passed(0.020), has_waited=False)
    assert second == pytest.approx((100.002, 100.010))
    now_s[0] = 100.5301
    third = clock.interval(Passed(0.5), Passed(0.53), has_waited=True)
    assert third[1] == pytest.approx(100.52, abs=0.02)
    assert third[1] - third[0] == pytest.approx(0.03)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_guard_is_on_inside_and_off_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def fail_inside() -> None:
        with no_waiting(is_on=is_on):
            assert modes[-1] == ("error" if is_on else 0)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert modes[-1] == 0


def test_a_machine_without_a_device_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no device"):
        CudaDevice(is_guarded=False)
