"""In which order are steps planned, launched and applied?

```
CPU     plan N+1 | launch N+1 | wait N | apply N | send N | receive | plan N+2 ...
device  step N .................. | step N+1 ..................
```

The plain loop (`--disable-overlap-schedule`) is the same calls in order. One thread runs the loop;
the scheduler belongs to it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsserve.engine.control import Control
from dsserve.engine.drafts import DraftCounts
from dsserve.engine.record import Stage, StepRecord, StepRecorder
from dsserve.engine.settings import MAX_STEPS_IN_FLIGHT
from dsserve.protocol import engine as wire
from dsserve.worker.base import NUM_BUFFER_SETS, PHASE_PREFILL

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsserve.engine.inbox import Inbox, LiveRequests
    from dsserve.engine.outbox import Outbox
    from dsserve.engine.scheduler_api import SchedulerApi, StepOutputs, StepSummary
    from dsserve.observe.log import StepLog
    from dsserve.worker.base import StepHandle, StepResult, Worker

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
NO_PLAN_WAIT_S = 0.01
"""Pause when something waits but nothing can run, so that such passes do not spin."""


@dataclass(slots=True)
class Progress:
    """What the watchdog reads; times are `time.monotonic()`, 0 for "not now".

    Attributes:
        last_pass_s: When the loop last showed that it is not stuck.
        step_since_s: Since when the oldest launched step has had the device.
        stalled_since_s: Since when something waits and nothing can be planned.
        snapshot: The state as of the last heartbeat.
    """

    last_pass_s: float = 0.0
    step_since_s: float = 0.0
    stalled_since_s: float = 0.0
    snapshot: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _InFlight:
    summary: StepSummary
    handle: StepHandle
    record: StepRecord


class StepLoop:
    """Runs an engine until it is told to shut down. Any exception that leaves `run` is fatal."""

    def __init__(
        self,
        *,
        scheduler: SchedulerApi,
        worker: Worker,
        inbox: Inbox,
        outbox: Outbox,
        requests: LiveRequests,
        step_log: StepLog,
        is_overlapped: bool,
        draft_len: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; the worker's buffer sets must be registered with the scheduler."""
        self._scheduler = scheduler
        self._worker = worker
        self._inbox = inbox
        self._outbox = outbox
        self._requests = requests
        self._step_log = step_log
        self._is_overlapped = is_overlapped
        self._clock = clock
        self._recorder = StepRecorder()
        self._drafts = DraftCounts(draft_len) if draft_len else None
        self._control = Control(
            scheduler=scheduler,
            requests=requests,
            outbox=outbox,
            clock=clock,
            describe=self.describe,
        )
        self._in_flight: deque[_InFlight] = deque()
        self._next_set = 0
        self._is_idle = False
        self._last_beat_s = float("-inf")
        self._pass_s = 0.0
        self.progress = Progress()

    def run(self) -> None:
        """Run until shutdown."""
        if self._is_overlapped:
            self._run_overlapped()
        else:
            self._run_plain()
        self._beat()

    def _run_overlapped(self) -> None:
        while not self._is_over():
            self._receive()
            is_launched = self._launch_next()
            if len(self._in_flight) == MAX_STEPS_IN_FLIGHT or (self._in_flight and not is_launched):
                self._finish_oldest()
            elif not self._in_flight:
                self._wait_for_work()

    def _run_plain(self) -> None:
        while not self._is_over():
            self._receive()
            if self._launch_next():
                self._finish_oldest()
            else:
                self._wait_for_work()

    def _is_over(self) -> bool:
        return self._control.is_draining and not self._in_flight and not len(self._requests)

    def _receive(self) -> None:
        """Take messages, and the ends of requests that no step carries."""
        begin_s = self._pass_s = self._clock()
        self.progress.last_pass_s = begin_s
        self._control.handle(self._inbox.drain())
        self._control.feed()
        self._control.abort_overdue(begin_s)
        self._publish(0, self._scheduler.take_outputs())
        if begin_s - self._last_beat_s >= HEARTBEAT_S:
            self._beat()
        self._spent("receive", begin_s)

    def _launch_next(self) -> bool:
        """Plan a step and put it on the device's queue; False if there is nothing to run."""
        begin_s = self._clock()
        set_index = self._next_set
        # Deadlines are judged by one reading of the clock in a pass; the others measure.
        summary = self._scheduler.next_plan(set_index, int(self._pass_s * 1e6))
        planned_s = self._spent("plan", begin_s)
        if summary is None:
            return False
        self._next_set = (set_index + 1) % NUM_BUFFER_SETS
        self._is_idle = False
        self.progress.stalled_since_s = 0.0
        admitted = self._requests.admit(summary.admitted)
        if admitted:
            self._worker.admit(admitted)
        handle = self._worker.launch(set_index)
        launched_s = self._spent("launch", planned_s)
        record = self._recorder.launched(
            step_id=summary.step_id,
            phase=summary.phase,
            num_requests=summary.num_requests,
            num_rows=summary.num_rows,
            planned_s=planned_s,
            launched_s=launched_s,
        )
        if not self._in_flight:
            self.progress.step_since_s = launched_s
        self._in_flight.append(_InFlight(summary, handle, record))
        return True

    def _finish_oldest(self) -> None:
        """Wait for the oldest step, apply its result and send what came out."""
        step = self._in_flight[0]
        begin_s = self._clock()
        while not step.handle.wait_done(HEARTBEAT_S):
            self.progress.last_pass_s = self._clock()
            self._beat()
        result = step.handle.wait()
        self._in_flight.popleft()
        done_s = self._spent("complete", begin_s)
        self.progress.step_since_s = done_s if self._in_flight else 0.0
        outputs = self._scheduler.apply(
            step.summary.step_id,
            result.token_ids,
            result.status,
            int(done_s * 1e6),
            result.num_ids,
        )
        if self._drafts is not None and result.drafts is not None:
            self._drafts.note(result.drafts, outputs)
        self._publish(step.summary.step_id, outputs)
        applied_s = self._spent("result", done_s)
        self._recorder.applied(
            step.record,
            started_s=result.started_s,
            finished_s=result.finished_s,
            applied_s=applied_s,
        )
        self._log_step(step.summary, result)

    def _publish(self, step_id: int, outputs: StepOutputs) -> None:
        """Send outputs; drop the requests that end with them."""
        if not outputs.len:
            return
        drafts: list[tuple[int, int]] = []
        if self._drafts is not None:
            drafts = [self._drafts.of_request(i) for i in wire.unpack_u64(outputs.request_ids)]
        self._outbox.send_outputs(step_id, outputs, drafts)
        codes = outputs.finish_codes
        if codes.count(0) == len(codes):
            return
        request_ids = wire.unpack_u64(outputs.request_ids)
        ended = [request_ids[i] for i, code in enumerate(codes) if code]
        if self._drafts is not None:
            for request_id in ended:
                self._drafts.forget(request_id)
        known = self._requests.remove(ended)
        if known:
            self._worker.release(known)

    def _wait_for_work(self) -> None:
        """Nothing runs and nothing can be planned: wait for messages."""
        if self._is_over() or self._control.has_parts:
            return
        begin_s = self._clock()
        if self._scheduler.has_work():
            self._recorder.passes_without_progress += 1
            self.progress.stalled_since_s = self.progress.stalled_since_s or begin_s
            self._inbox.wait(NO_PLAN_WAIT_S)
        else:
            if not self._is_idle:
                self._is_idle = True
                self._recorder.idled()
                self._scheduler.check_invariants()
                self._beat()
            self.progress.stalled_since_s = 0.0
            self._inbox.wait(HEARTBEAT_S)
        self._spent("idle", begin_s)

    def _spent(self, stage: Stage, begin_s: float) -> float:
        now_s = self._clock()
        self._recorder.stage_s[stage] += now_s - begin_s
        return now_s

    def _beat(self) -> None:
        now_s = self._clock()
        self._last_beat_s = now_s
        since_s = self.progress.step_since_s
        self.progress.snapshot = self.describe(num_steps=8)
        stats = {**self._levels(), **self.progress.snapshot["stats"]}
        stats |= self._recorder.totals() | self._worker.totals()
        if self._drafts is not None:
            stats |= self._drafts.totals()
        stats["pools"] = self.progress.snapshot["pools"]
        self._outbox.try_send(
            wire.Heartbeat(
                time_s=now_s, step_age_s=now_s - since_s if since_s else 0.0, stats=stats
            )
        )

    def _levels(self) -> dict[str, Any]:
        """Requests and pool usage, under the names of the metrics (`serving.md` h.1)."""
        stats = self._scheduler.stats()
        levels: dict[str, Any] = {
            "num_running_reqs": int(stats["num_running"]),
            "num_queue_reqs": int(stats["num_waiting"]),
        }
        for pool in self._scheduler.pool_table():
            used = pool["capacity"] - pool["free"] - pool["evictable"]
            name = "token_usage" if pool["name"] == "full" else f"{pool['name']}_usage"
            levels[name] = round(used / max(pool["capacity"], 1), 4)
        return levels

    def _decode_levels(self) -> dict[str, Any]:
        """The levels, and how many tokens a verification brought since the last line."""
        levels = self._levels()
        if self._drafts is not None:
            levels["accept_len"] = self._drafts.take_accept_len()
        return levels

    def describe(self, *, num_steps: int = 64) -> dict[str, Any]:
        """Return what a state query and the watchdog show. Only the loop's thread calls it."""
        return {
            "stats": self._scheduler.stats(),
            "pools": self._scheduler.pool_table(),
            "num_live_requests": len(self._requests),
            "steps_in_flight": [step.summary.step_id for step in self._in_flight],
            "is_overlapped": self._is_overlapped,
            "loop": self._recorder.totals(),
            "recent_steps": self._recorder.recent(num_steps),
        }

    def _log_step(self, summary: StepSummary, result: StepResult) -> None:
        if summary.phase != PHASE_PREFILL:
            num_ids = result.num_ids
            num_tokens = summary.num_requests if num_ids is None else int(num_ids.sum())
            self._step_log.decode(num_tokens, self._decode_levels)
            return
        values = {
            "step": summary.step_id,
            "requests": summary.num_requests,
            "rows": summary.num_rows,
            "new_tokens": summary.num_prefill_tokens,
            "cached_tokens": summary.num_cached_tokens,
            "replay_rows": summary.num_replay_rows,
            "tail_rows": summary.num_tail_rows,
            "wall_ms": round(result.wall_s * 1e3, 3),
        }
        self._step_log.prefill(values, self._levels())
