"""The next step is on the device's queue before the last one ends, whatever kind the steps are.

The real loop and the real scheduler over a device whose clock is a number (`virtual_device.py`): the trace
shows the order, and no machine's speed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dsserve import _native
from dsserve.engine.inbox import Inbox, LiveRequests
from dsserve.engine.loop import StepLoop
from dsserve.engine.outbox import Outbox
from dsserve.observe.log import StepLog
from dsserve.observe.metrics import Metrics
from dsserve.protocol import engine as wire
from dsserve.worker.base import PHASE_DECODE, PHASE_PREFILL, PHASE_VERIFY
from fakes import StubSocket
from virtual_device import VirtualClock, VirtualDevice, VirtualStep

if TYPE_CHECKING:
    from collections.abc import Callable


def request(request_id: int, prompt_len: int = 9, **fields: Any) -> wire.EngineRequest:
    token_ids = [2 + (request_id * 7 + index) % 40 for index in range(prompt_len)]
    values = {"token_ids": wire.pack_u32(token_ids), "max_new_tokens": 12, "ignore_eos": True}
    return wire.EngineRequest(request_id=request_id, **values | fields)


class Trace:
    """One run of the loop, from its first message to its end."""

    def __init__(
        self,
        requests: list[wire.EngineRequest],
        *,
        later: dict[int, Callable[[], wire.ToEngine]] | None = None,
        is_overlapped: bool = True,
        config: dict[str, Any] | None = None,
        **device: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.scheduler = _native.Scheduler(
            json.dumps(
                {
                    "page_size": 4,
                    "num_pages": 200,
                    "max_running_requests": 8,
                    "chunked_prefill_size": 24,
                    "context_length": 160,
                    "window": 8,
                    "vocab_size": 50,
                    "eos_token_ids": [1],
                }
                | (config or {})
            )
        )
        capacity = self.scheduler.plan_capacity()
        self.device = VirtualDevice(self.clock, capacity, **device)
        self.scheduler.register_buffers(self.device.buffer_sets())
        messages: list[wire.ToEngine] = [wire.Hello(), wire.SubmitBatch(requests=requests)]
        self.socket_in = StubSocket([wire.encode(message) for message in messages])
        self.socket_out = StubSocket()
        self.later = later or {}
        self.loop = StepLoop(
            scheduler=self.scheduler,
            worker=self.device,
            inbox=Inbox(self.socket_in, clock=self._inbox_clock),
            outbox=Outbox(self.socket_out),
            requests=LiveRequests(has_scripts=False),
            step_log=StepLog(decode_interval=1000),
            is_overlapped=is_overlapped,
            clock=self.clock,
        )
        self.loop.run()
        self.steps: list[VirtualStep] = self.device.steps

    def _inbox_clock(self) -> float:
        """Feeds what is to arrive once so many steps were launched; the last message is the end."""
        for count in sorted(self.later):
            if len(self.device.steps) >= count:
                self.socket_in.frames.append(wire.encode(self.later.pop(count)()))
        if not self.later and len(self.device.steps) > 1 and not self.scheduler.has_work():
            self.socket_in.frames.append(wire.encode(wire.Shutdown()))
        return 0.0

    def ends(self) -> dict[int, int]:
        ends = {}
        for message in self.socket_out.sent:
            if isinstance(message, wire.Outputs):
                ids = wire.unpack_u64(message.request_ids)
                ends |= {i: c for i, c in zip(ids, message.finish_codes, strict=True) if c}
        return ends

    def late_launches(self) -> list[int]:
        """Steps that were launched only after the one before had ended."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [after.step_id for before, after in pairs if after.launched_s >= before.finished_s]

    def host_gaps(self) -> dict[str, Any]:
        beats = [m for m in self.socket_out.sent if isinstance(m, wire.Heartbeat)]
        stats: dict[str, Any] = beats[-1].stats
        return stats


def kinds(trace: Trace) -> set[int]:
    return {step.phase for step in trace.steps}


def test_decode_steps_never_wait_for_the_host() -> None:
    trace = Trace([request(i) for i in range(1, 5)])
    assert kinds(trace) == {PHASE_PREFILL, PHASE_DECODE}
    assert trace.late_launches() == []
    assert all(
        after.started_s == before.finished_s
        for before, after in zip(trace.steps, trace.steps[1:], strict=False)
    )


def test_chunks_of_a_prompt_never_wait_for_the_host() -> None:
    trace = Trace([request(1, 120)])
    assert sum(step.phase == PHASE_PREFILL for step in trace.steps) >= 5
    assert trace.late_launches() == []


def test_mixed_steps_never_wait_for_the_host() -> None:
    arrivals = {3: lambda: wire.SubmitBatch(requests=[request(9, 100)])}
    trace = Trace([request(1, max_new_tokens=40)], later=arrivals, config={"mixed_chunk": True})
    mixed = [s for s in trace.steps if s.phase == PHASE_PREFILL and s.has_decode]
    assert len(mixed) >= 4
    assert trace.late_launches() == []


@pytest.mark.parametrize("accepts", [0, 1, 3])
def test_verify_steps_never_wait_for_the_accepted_length(accepts: int) -> None:
    requests = [request(i, max_new_tokens=30) for i in range(1, 4)]
    trace = Trace(requests, config={"draft_len": 3}, accepts=accepts)
    assert PHASE_VERIFY in kinds(trace)
    assert trace.late_launches() == []
    assert set(trace.ends().values()) == {wire.FinishCode.LENGTH}


def test_a_stop_found_late_costs_a_row_and_no_gap() -> None:
    stops = [
        wire.EngineRequest(
            request_id=i,
            token_ids=wire.pack_u32([5 + i] * 9),
            max_new_tokens=30,
        )
        for i in (1, 2)
    ]
    trace = Trace([*stops, request(3, max_new_tokens=20)], stop_at={1: 4, 2: 9})
    assert trace.late_launches() == []
    assert trace.ends() == {
        1: wire.FinishCode.STOP_TOKEN,
        2: wire.FinishCode.STOP_TOKEN,
        3: wire.FinishCode.LENGTH,
    }


def test_aborts_cost_no_gap() -> None:
    later = {
        4: lambda: wire.Abort(request_ids=wire.pack_u64([1])),
        7: lambda: wire.Finish(request_id=2, kept_tokens=3),
    }
    trace = Trace([request(i, max_new_tokens=25) for i in (1, 2, 3)], later=later)
    assert trace.late_launches() == []
    assert trace.ends() == {
        1: wire.FinishCode.ABORT,
        2: wire.FinishCode.STOP_STRING,
        3: wire.FinishCode.LENGTH,
    }


@pytest.mark.parametrize("draft_len", [0, 2])
def test_the_forward_of_a_row_with_a_grammar_does_not_wait_for_its_mask(draft_len: int) -> None:
    requests = [request(1, max_new_tokens=20, needs_mask=True), request(2, max_new_tokens=20)]
    trace = Trace(requests, config={"draft_len": draft_len}, mask_s=0.004, accepts=1)
    assert trace.late_launches() == []
    masked = [step for step in trace.steps if step.has_mask]
    assert len(masked) >= 5
    # A forward of 10 ms hides a mask of 4 ms whole; the sampling follows at once.
    for step in masked:
        sampled_s = step.finished_s - trace.device.sample_s
        assert sampled_s == pytest.approx(step.forward_done_s)


def test_a_mask_slower_than_the_forward_delays_the_sampling_alone() -> None:
    requests = [request(1, max_new_tokens=10, needs_mask=True)]
    trace = Trace(requests, mask_s=0.025)
    pairs = zip(trace.steps, trace.steps[1:], strict=False)
    for before, after in pairs:
        assert after.launched_s < before.finished_s
        assert after.started_s == before.finished_s
        assert after.finished_s == pytest.approx(before.finished_s + 0.025 + 0.001)


def test_retraction_costs_no_gap_but_where_all_memory_is_on_its_way_back() -> None:
    config = {"num_pages": 24, "conservativeness": 0.0}
    requests = [request(i, max_new_tokens=40, ignore_eos=False) for i in (1, 2, 3, 4)]
    trace = Trace(requests, config=config)
    stats = trace.scheduler.stats()
    assert stats["retracted_total"] > 0
    assert set(trace.ends().values()) == {wire.FinishCode.LENGTH}
    most = stats["retracted_total"] + stats["stalled_rows_total"]
    assert len(trace.late_launches()) <= most


def test_preemption_costs_no_gap() -> None:
    config = {
        "max_running_requests": 2,
        "priority": {"enabled": True, "preemption_threshold": 0},
    }
    first = [request(i, max_new_tokens=30, priority=1) for i in (1, 2)]
    arrivals = {5: lambda: wire.SubmitBatch(requests=[request(9, 30, priority=5)])}
    trace = Trace(first, later=arrivals, config=config)
    assert trace.scheduler.stats()["preempted_total"] == 1
    assert trace.late_launches() == []
    assert set(trace.ends().values()) == {wire.FinishCode.LENGTH}


def test_the_plain_loop_shows_what_overlap_saves() -> None:
    requests = [request(i) for i in range(1, 5)]
    plain = Trace(requests, is_overlapped=False)
    overlapped = Trace(requests)
    assert plain.late_launches() == [step.step_id for step in plain.steps[1:]]
    assert plain.ends() == overlapped.ends()
    assert sum(step.num_requests for step in plain.steps) <= sum(
        step.num_requests for step in overlapped.steps
    )


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_host_gaps_and_stages_are_metrics(is_overlapped: bool) -> None:
    requests = [request(i, max_new_tokens=30) for i in range(1, 4)]
    trace = Trace(requests, is_overlapped=is_overlapped, config={"draft_len": 2})
    metrics = Metrics(model_name="m")
    metrics.update_engine(trace.host_gaps(), max_tokens=800)
    labels = {"model_name": "m", "dp_rank": "0", "role": "unified"}

    def value(name: str, **more: str) -> float:
        number = metrics.registry.get_sample_value(name, labels | more)
        assert number is not None, name
        return number

    gaps = {"kind": "verify"}
    count = value("dsserve_host_gap_seconds_count", **gaps)
    assert count == sum(step.phase == PHASE_VERIFY for step in trace.steps)
    in_no_time = value("dsserve_host_gap_seconds_bucket", le="1e-06", **gaps)
    assert in_no_time == (count if is_overlapped else 0)
    total_s = value("dsserve_host_gap_seconds_sum", **gaps)
    assert (total_s == 0) == is_overlapped
    for stage in ("receive", "plan", "launch", "result"):
        assert value("dsserve_scheduler_stage_seconds_total", stage=stage) > 0
