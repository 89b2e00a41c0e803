"""A device with a clock of its own making: steps take set times, the host's calls take none of them.

`VirtualClock` only moves when somebody says so. `VirtualDevice` is a worker: a step starts when it is
launched or when the one before ends, whichever is later, and waiting for it moves the clock to its end.
So a trace shows what the loop's order makes of the device's time, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dsserve.worker.base import (
    NUM_BUFFER_SETS,
    STATUS_OK,
    AdmittedRequest,
    PlanBuffers,
    StepResult,
    allocate_plan_buffers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MASKED = 2
HOST_CALL_S = 1e-6


@dataclass
class VirtualClock:
    """Seconds; each look at it costs the host a little."""

    now_s: float = 1.0

    def __call__(self) -> float:
        self.now_s += HOST_CALL_S
        return self.now_s


@dataclass
class VirtualStep:
    """What the device did with one plan."""

    step_id: int
    phase: int
    num_requests: int
    has_decode: bool
    has_mask: bool
    launched_s: float
    started_s: float
    forward_done_s: float
    finished_s: float
    result: StepResult
    device: VirtualDevice

    def done(self) -> bool:
        return self.device.clock.now_s >= self.finished_s

    def wait_done(self, timeout_s: float) -> bool:
        clock = self.device.clock
        clock.now_s = max(clock.now_s, min(self.finished_s, clock.now_s + timeout_s))
        return self.done()

    def wait(self) -> StepResult:
        clock = self.device.clock
        clock.now_s = max(clock.now_s, self.finished_s)
        self.device.fetched_s[self.step_id] = clock.now_s
        return self.result


@dataclass
class VirtualDevice:
    """A worker without a model.

    Attributes:
        step_s: Time of a step's forward.
        sample_s: Time of its sampling.
        mask_s: Time to compute a mask, from when the ids of the step before are on the host.
        accepts: Drafts that are accepted of each row.
        stop_at: Request id -> the output position at which it samples the stop id 1.
    """

    clock: VirtualClock
    capacity: dict[str, int]
    step_s: float = 0.010
    sample_s: float = 0.001
    mask_s: float = 0.002
    accepts: int = 0
    stop_at: dict[int, int] = field(default_factory=dict)
    steps: list[VirtualStep] = field(default_factory=list)
    fetched_s: dict[int, float] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sets = [allocate_plan_buffers(self.capacity) for _ in range(NUM_BUFFER_SETS)]

    def buffer_sets(self) -> list[PlanBuffers]:
        return self._sets

    def totals(self) -> dict[str, Any]:
        return {}

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        self.outputs |= {request.request_id: 0 for request in requests}

    def launch(self, set_index: int) -> VirtualStep:
        plan = self._sets[set_index]
        step_id, phase, num_requests = plan["header"][:3].tolist()
        samples = plan["samples"][:num_requests]
        before = self.steps[-1] if self.steps else None
        launched_s = self.clock.now_s
        started_s = max(launched_s, before.finished_s if before else 0.0)
        forward_done_s = sampling_s = started_s + self.step_s
        has_mask = bool((samples & MASKED).any())
        if has_mask and before is not None:
            # The mask needs the ids of the step before on the host; the forward does not wait.
            sampling_s = max(forward_done_s, before.finished_s + self.mask_s)
        finished_s = sampling_s + self.sample_s
        token_ids, num_ids = self._sample(plan, num_requests)
        result = StepResult(
            step_id=step_id,
            token_ids=token_ids,
            status=np.full(num_requests, STATUS_OK, np.uint8),
            wall_s=finished_s - started_s,
            started_s=started_s,
            finished_s=finished_s,
            num_ids=num_ids,
        )
        step = VirtualStep(
            step_id=step_id,
            phase=phase,
            num_requests=num_requests,
            has_decode=bool((plan["history_ids"][:num_requests] == -2).any()),
            has_mask=has_mask,
            launched_s=launched_s,
            started_s=started_s,
            forward_done_s=forward_done_s,
            finished_s=finished_s,
            result=result,
            device=self,
        )
        self.steps.append(step)
        return step

    def release(self, request_ids: Sequence[int]) -> None:
        self.released += request_ids

    def close(self) -> None:
        """Nothing to give back."""

    def _sample(self, plan: PlanBuffers, num_requests: int) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        counts: list[int] = []
        for index in range(num_requests):
            count = 0
            if plan["samples"][index]:
                count = min(self.accepts, int(plan["draft_len"][index])) + 1
            request_id = int(plan["request_id"][index])
            for _ in range(count):
                self.outputs[request_id] += 1
                is_stop = self.stop_at.get(request_id) == self.outputs[request_id]
                ids.append(1 if is_stop else 7)
            counts.append(count)
        return np.array(ids, np.int32), np.array(counts, np.uint32)
