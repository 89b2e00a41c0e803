"""A step on a CUDA stream: when it is done, what it produced, when the device began and ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsserve.worker.base import STATUS_NAN, STATUS_OK, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve.worker.cuda_device import Event

#: Between two looks at an event.
POLL_S = 20e-6
#: Times of events that are further than this from what the host saw are replaced by that.
MAX_DRIFT_S = 1e-3


class DeviceClock:
    """Puts the times of a stream's events on the host's clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows nothing before the first step."""
        self._clock = clock
        self._last: tuple[Event, float] | None = None

    def interval(self, started: Event, finished: Event, *, has_waited: bool) -> tuple[float, float]:
        """When a step began and ended. Steps come in order.

        Args:
            started: Passed by the device.
            finished: Passed by the device, just now if `has_waited`.
            has_waited: Whether the host saw it happen.
        """
        now_s = self._clock()
        finished_s = now_s
        if self._last is not None:
            event, at_s = self._last
            by_events_s = at_s + event.elapsed_time(finished) / 1e3
            if not has_waited:
                finished_s = min(now_s, by_events_s)
            elif now_s - MAX_DRIFT_S <= by_events_s <= now_s:
                finished_s = by_events_s
        self._last = finished, finished_s
        return finished_s - started.elapsed_time(finished) / 1e3, finished_s


@dataclass(slots=True)
class CudaStep:
    """A launched step (`worker.base.StepHandle`).

    Attributes:
        started: Before the step's first work.
        finished: After the copy of its results to pinned memory.
        read: Makes the result of what lies there; told when the device began and ended.
        device_clock: Of the stream.
    """

    started: Event
    finished: Event
    read: Callable[[float, float], StepResult]
    device_clock: DeviceClock
    _result: StepResult | None = None

    def done(self) -> bool:
        """Whether the device has ended the step."""
        return self._result is not None or self.finished.query()

    def wait_done(self, timeout_s: float) -> bool:
        """Look at the event until it is passed or the time is over."""
        end_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end_s:
                return False
            time.sleep(POLL_S)
            if self.finished.query():
                self._read(has_waited=True)
        return True

    def wait(self) -> StepResult:
        """Wait for the step; a fault of the device is raised here."""
        if self._result is None:
            has_waited = not self.finished.query()
            self.finished.synchronize()
            self._read(has_waited=has_waited)
        if self._result is None:
            raise RuntimeError("a finished step has no result")
        return self._result

    def _read(self, *, has_waited: bool) -> None:
        interval = self.device_clock.interval(self.started, self.finished, has_waited=has_waited)
        self._result = self.read(*interval)


@dataclass(frozen=True, slots=True)
class DrawnIds:
    """Reads the result of a step in which each sampled request draws one token.

    Attributes:
        step_id: Of the plan.
        samples: [B] bool, requests that draw.
        drawn: [S, 2] int64 in pinned memory: ids, and whether the logits were broken.
    """

    step_id: int
    samples: NDArray[np.bool_]
    drawn: Tensor

    def __call__(self, started_s: float, finished_s: float) -> StepResult:
        """The result; the copy to `drawn` is done."""
        drawn = self.drawn.numpy()
        token_ids = np.full(len(self.samples), -1, dtype=np.int32)
        token_ids[self.samples] = drawn[:, 0]
        status = np.full(len(self.samples), STATUS_OK, dtype=np.uint8)
        status[np.flatnonzero(self.samples)[drawn[:, 1] != 0]] = STATUS_NAN
        return StepResult(
            self.step_id, token_ids, status, finished_s - started_s, started_s, finished_s
        )
