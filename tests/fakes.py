"""Stand-ins for the parts around the step loop: a scheduler, a worker and a socket that tests steer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from dsserve.protocol import engine as wire
from dsserve.worker.base import PHASE_DECODE, AdmittedRequest, PlanBuffers, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass
class StubSummary:
    step_id: int
    admitted: list[int]
    phase: int = PHASE_DECODE
    num_requests: int = 1
    num_rows: int = 1
    num_replay_rows: int = 0
    num_tail_rows: int = 1
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass
class StubOutputs:
    ids: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    @property
    def len(self) -> int:
        return len(self.ids)

    @property
    def request_ids(self) -> bytes:
        return wire.pack_u64(self.ids)

    @property
    def token_offsets(self) -> bytes:
        return wire.pack_u32(range(len(self.ids) + 1))

    @property
    def token_ids(self) -> bytes:
        return wire.pack_u32([7] * len(self.ids))

    @property
    def finish_codes(self) -> bytes:
        return bytes(self.codes)

    @property
    def prompt_lens(self) -> bytes:
        return wire.pack_u32([1] * len(self.ids))

    cached_lens = output_lens = prompt_lens


class StubScheduler:
    """Plans `num_steps` steps of one request, which ends with the last; writes down all calls."""

    def __init__(self, num_steps: int, events: list[str]) -> None:
        self.num_steps = num_steps
        self.events = events
        self.planned = 0
        self.plan_times_us: list[int] = []
        self.applied = 0
        self.request_id = 0
        self.aborted: list[int] = []
        self.pending_outputs = StubOutputs()
        self.rejects: dict[int, tuple[str, str]] = {}
        self.rejects_parts: dict[int, tuple[str, str]] = {}
        self.specs: list[dict[str, Any]] = []
        self.given: dict[int, list[int]] = {}

    def submit(self, specs: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
        self.events.append(f"submit {[spec['request_id'] for spec in specs]}")
        self.specs += specs
        rejected = [
            (i, *self.rejects[i]) for i in (s["request_id"] for s in specs) if i in self.rejects
        ]
        taken = [s["request_id"] for s in specs if s["request_id"] not in self.rejects]
        self.request_id = taken[-1] if taken else self.request_id
        return rejected

    def extend_prompt(self, request_id: int, token_ids: Any) -> tuple[int, str, str] | None:
        self.events.append(f"extend {request_id} by {token_ids.size}")
        self.given.setdefault(request_id, []).extend(token_ids[[0, -1]].tolist())
        refusal = self.rejects_parts.get(request_id)
        return None if refusal is None else (request_id, *refusal)

    def next_plan(self, set_index: int, now_us: int) -> StubSummary | None:
        if not self.request_id or self.planned == self.num_steps:
            return None
        self.planned += 1
        self.plan_times_us.append(now_us)
        self.events.append(f"plan {self.planned} in set {set_index}")
        return StubSummary(self.planned, [self.request_id] if self.planned == 1 else [])

    def apply(
        self, step_id: int, token_ids: Any, status: Any, now_us: int, num_ids: Any = None
    ) -> StubOutputs:
        self.events.append(f"apply {step_id}")
        self.applied = step_id
        if self.request_id in self.aborted:
            return StubOutputs()
        is_last = step_id == self.num_steps
        return StubOutputs([self.request_id], [wire.FinishCode.LENGTH if is_last else 0])

    def take_outputs(self) -> StubOutputs:
        outputs, self.pending_outputs = self.pending_outputs, StubOutputs()
        return outputs

    def abort(self, request_ids: list[int]) -> None:
        self.events.append(f"abort {request_ids}")
        self.aborted += request_ids
        self.num_steps = self.planned
        self.pending_outputs = StubOutputs(request_ids, [wire.FinishCode.ABORT] * len(request_ids))

    def finish(self, request_id: int, kept_output_tokens: int) -> None:
        self.events.append(f"finish {request_id} at {kept_output_tokens}")

    def flush(self) -> tuple[bool, list[int]]:
        return False, [self.request_id]

    def stats(self) -> dict[str, float]:
        return {"num_running": 0, "num_waiting": 0}

    def pool_table(self) -> list[dict[str, Any]]:
        return [{"name": "full", "capacity": 10, "free": 6, "evictable": 2}]

    def check_invariants(self) -> None:
        self.events.append("check")

    def has_work(self) -> bool:
        return self.applied < self.planned


class StubHandle:
    def __init__(self, step_id: int, worker: StubWorker) -> None:
        self.step_id = step_id
        self.worker = worker

    def done(self) -> bool:
        return self.worker.may_end(self.step_id)

    def wait_done(self, timeout_s: float) -> bool:
        self.worker.events.append(f"wait {self.step_id}")
        return self.worker.may_end(self.step_id)

    def wait(self) -> StepResult:
        if self.worker.error is not None:
            raise self.worker.error
        ids, status = np.zeros(1, np.int32), np.zeros(1, np.uint8)
        return StepResult(self.step_id, ids, status, 1.0, self.step_id, self.step_id + 1.0)


class StubWorker:
    """Launches nothing; `may_end(step_id)` says whether a step has ended."""

    def __init__(
        self, events: list[str], may_end: Callable[[int], bool] = lambda _step_id: True
    ) -> None:
        self.events = events
        self.may_end = may_end
        self.launched = 0
        self.error: Exception | None = None

    def buffer_sets(self) -> list[PlanBuffers]:
        return []

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        self.events.append(f"admit {[request.request_id for request in requests]}")

    def launch(self, set_index: int) -> StubHandle:
        self.launched += 1
        self.events.append(f"launch {self.launched} from set {set_index}")
        return StubHandle(self.launched, self)

    def release(self, request_ids: Sequence[int]) -> None:
        self.events.append(f"release {list(request_ids)}")

    def totals(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.events.append("close")


class StubSocket:
    """Gives the frames it was filled with; keeps what is sent."""

    def __init__(self, frames: Sequence[bytes] = ()) -> None:
        self.frames = deque(frames)
        self.sent: list[wire.FromEngine] = []

    def recv(self, flags: int = 0) -> bytes:
        if not self.frames:
            raise zmq.Again
        return self.frames.popleft()

    def send(self, frame: bytes, flags: int = 0) -> None:
        self.sent.append(wire.decode_from_engine(frame))

    def poll(self, timeout: int, flags: int) -> int:
        return len(self.frames)
