import pytest

from dsserve.engine.inbox import Inbox, LiveRequests
from dsserve.engine.loop import StepLoop
from dsserve.engine.outbox import Outbox
from dsserve.engine.parts import TOKENS_A_PASS
from dsserve.observe.log import StepLog
from dsserve.protocol import engine as wire
from fakes import StubScheduler, StubSocket, StubWorker


def request(request_id=1, **fields):
    values = {"token_ids": wire.pack_u32([5]), "max_new_tokens": 9, **fields}
    return wire.EngineRequest(request_id=request_id, **values)


def hello_then(*messages):
    return [wire.encode(message) for message in (wire.Hello(), *messages)]


class Bench:
    """A loop between stubs."""

    def __init__(self, *, num_steps=4, is_overlapped=True, messages=None, may_end=None):
        self.events = []
        self.scheduler = StubScheduler(num_steps, self.events)
        self.worker = StubWorker(self.events, may_end or (lambda _step_id: True))
        if messages is None:
            messages = [wire.SubmitBatch(requests=[request()]), wire.Shutdown(grace_s=1e6)]
        self.socket_in = StubSocket(hello_then(*messages))
        self.socket_out = StubSocket()
        self.time_s = 0.0
        self.loop = StepLoop(
            scheduler=self.scheduler,
            worker=self.worker,
            inbox=Inbox(self.socket_in, clock=lambda: 0.0),
            outbox=Outbox(self.socket_out),
            requests=LiveRequests(has_scripts=False),
            step_log=StepLog(decode_interval=40),
            is_overlapped=is_overlapped,
            clock=self._tick,
        )

    def _tick(self):
        self.time_s += 1e-5
        return self.time_s

    def run(self):
        self.loop.run()
        return self

    def sent(self, kind):
        return [message for message in self.socket_out.sent if isinstance(message, kind)]

    def step_events(self):
        words = ("plan", "launch", "apply")
        return [" ".join(e.split()[:2]) for e in self.events if e.startswith(words)]


def test_overlapped_loop_launches_the_next_step_before_it_applies_the_last():
    assert Bench(num_steps=4).run().step_events() == [
        "plan 1",
        "launch 1",
        "plan 2",
        "launch 2",
        "apply 1",
        "plan 3",
        "launch 3",
        "apply 2",
        "plan 4",
        "launch 4",
        "apply 3",
        "apply 4",
    ]


def test_plain_loop_makes_the_same_calls_in_order():
    steps = Bench(num_steps=3, is_overlapped=False).run().step_events()
    assert steps == [f"{word} {i}" for i in (1, 2, 3) for word in ("plan", "launch", "apply")]


def test_step_that_only_ends_once_the_next_is_launched_does_end():
    bench = Bench(num_steps=5)
    bench.worker.may_end = lambda step_id: bench.worker.launched > min(step_id, 4)
    bench.run()
    assert bench.scheduler.applied == 5


def test_no_set_is_rewritten_before_three_steps_passed():
    bench = Bench(num_steps=7).run()
    sets = [int(e.split()[-1]) for e in bench.events if e.startswith("plan")]
    assert sets == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_request_is_told_to_the_worker_before_its_first_step_and_released_at_its_end(is_overlapped):
    bench = Bench(is_overlapped=is_overlapped).run()
    events = bench.events
    assert events.index("admit [1]") < events.index("launch 1 from set 0")
    assert events.index("apply 4") < events.index("release [1]")
    assert events.count("admit [1]") == events.count("release [1]") == 1


def test_every_submission_is_answered_and_ends_once():
    bench = Bench(
        messages=[
            wire.SubmitBatch(requests=[request(1), request(2)]),
            wire.Shutdown(grace_s=1e6),
        ]
    )
    bench.scheduler.rejects = {2: ("queue_full", "the queue is full")}
    bench.run()
    assert [wire.unpack_u64(m.request_ids) for m in bench.sent(wire.Accepted)] == [[1]]
    assert [(m.request_id, m.code) for m in bench.sent(wire.Rejected)] == [(2, "queue_full")]
    ends = [code for m in bench.sent(wire.Outputs) for code in m.finish_codes if code]
    assert ends == [wire.FinishCode.LENGTH]


def test_deadlines_are_judged_by_the_time_at_which_the_pass_began():
    bench = Bench(num_steps=3)
    began_us = []
    handle = bench.loop._control.abort_overdue

    def abort_overdue(now_s):
        began_us.append(int(now_s * 1e6))
        handle(now_s)

    bench.loop._control.abort_overdue = abort_overdue
    bench.run()
    assert bench.scheduler.plan_times_us == began_us[:3]


def test_a_long_prompt_is_handed_over_in_parts_one_a_pass():
    ids = wire.pack_u32(range(2 * TOKENS_A_PASS + 5))
    long = request(2, token_ids=ids)
    messages = [wire.SubmitBatch(requests=[long]), wire.Shutdown(grace_s=1e6)]
    bench = Bench(messages=messages, num_steps=6).run()
    words = ("submit", "extend", "plan")
    calls = [" ".join(e.split()[:4]) for e in bench.events if e.startswith(words)]
    assert calls[:6] == [
        "submit [2]",
        f"extend 2 by {TOKENS_A_PASS}",
        "plan 1 in set",
        f"extend 2 by {TOKENS_A_PASS}",
        "plan 2 in set",
        "extend 2 by 5",
    ]
    assert bench.scheduler.specs[0]["prompt_len"] == 2 * TOKENS_A_PASS + 5
    first, second = TOKENS_A_PASS, 2 * TOKENS_A_PASS
    assert bench.scheduler.given[2] == [0, first - 1, first, second - 1, second, second + 4]
    accepted = [wire.unpack_u64(m.request_ids) for m in bench.sent(wire.Accepted)]
    assert accepted == [[2]], "once it is whole"


@pytest.mark.parametrize("refused_at", ["submission", "part"])
def test_a_long_prompt_that_is_refused_is_handed_over_no_further(refused_at):
    long = request(2, token_ids=bytes(4 * (3 * TOKENS_A_PASS)))
    bench = Bench(
        messages=[wire.SubmitBatch(requests=[long, request(1)]), wire.Shutdown(grace_s=1e6)]
    )
    refusal = {2: ("invalid_token_id", "an id")}
    if refused_at == "part":
        bench.scheduler.rejects_parts = refusal
    else:
        bench.scheduler.rejects = refusal
    bench.run()
    extended = [e for e in bench.events if e.startswith("extend")]
    assert len(extended) == (refused_at == "part")
    assert [(m.request_id, m.code) for m in bench.sent(wire.Rejected)] == [(2, "invalid_token_id")]
    assert [wire.unpack_u64(m.request_ids) for m in bench.sent(wire.Accepted)] == [[1]]
    assert len(bench.loop._requests) == 0


def test_the_loop_does_not_pause_while_parts_are_missing():
    long = request(2, token_ids=bytes(4 * (3 * TOKENS_A_PASS)))
    bench = Bench(messages=[wire.SubmitBatch(requests=[long])])
    bench.scheduler.next_plan = lambda _set_index, _now_us: None
    bench.scheduler.has_work = lambda: True
    pauses = []

    def poll(_timeout, _flags):
        if not pauses:
            bench.socket_in.frames.append(wire.encode(wire.Shutdown(grace_s=0.0)))
        pauses.append(len(bench.scheduler.given.get(2, [])))
        return 1

    bench.socket_in.poll = poll
    bench.run()
    assert pauses[0] == 6, "only after the third part"


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": b"\x01\x02\x03"},
        {"stop_token_ids": b"\x01"},
        {"max_new_tokens": 2**32},
        {"priority": 2**31},
        {"custom_params": {"script": {"ids": [1]}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_request_out_of_range_is_rejected_without_harm_to_its_batch(fields):
    bench = Bench(
        messages=[
            wire.SubmitBatch(requests=[request(2, **fields), request(1)]),
            wire.Shutdown(grace_s=1e6),
        ]
    ).run()
    assert [m.request_id for m in bench.sent(wire.Rejected)] == [2]
    assert "submit [1]" in bench.events


def test_second_request_with_a_live_id_is_rejected():
    bench = Bench(
        messages=[
            wire.SubmitBatch(requests=[request(1), request(1)]),
            wire.Shutdown(grace_s=1e6),
        ]
    ).run()
    assert [m.code for m in bench.sent(wire.Rejected)] == ["duplicate_request_id"]
    assert "submit [1]" in bench.events


def test_submissions_of_one_pass_are_one_call_but_keep_their_place_among_aborts():
    bench = Bench(
        messages=[
            wire.SubmitBatch(requests=[request(1)]),
            wire.SubmitBatch(requests=[request(2)]),
            wire.Abort(request_ids=wire.pack_u64([2])),
            wire.SubmitBatch(requests=[request(3)]),
            wire.Abort(all=True),
            wire.Shutdown(grace_s=1e6),
        ]
    ).run()
    calls = [e for e in bench.events if e.startswith(("submit", "abort"))]
    assert calls == ["submit [1, 2]", "abort [2]", "submit [3]", "abort [1, 2, 3]"]


def test_requests_after_shutdown_are_rejected_and_those_running_end():
    bench = Bench(
        messages=[
            wire.SubmitBatch(requests=[request(1)]),
            wire.Shutdown(grace_s=1e6),
            wire.SubmitBatch(requests=[request(2)]),
        ]
    ).run()
    assert [(m.request_id, m.code) for m in bench.sent(wire.Rejected)] == [(2, "not_ready")]
    assert bench.scheduler.applied == 4


def test_requests_past_the_grace_period_are_aborted():
    bench = Bench(
        messages=[wire.SubmitBatch(requests=[request(1)]), wire.Shutdown(grace_s=0.0)]
    ).run()
    assert "abort [1]" in bench.events
    assert [code for m in bench.sent(wire.Outputs) for code in m.finish_codes if code] == [
        wire.FinishCode.ABORT
    ]


def test_exception_of_a_step_leaves_the_loop():
    bench = Bench()
    bench.worker.error = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        bench.run()


def test_long_step_beats_and_says_its_age():
    bench = Bench(num_steps=1)
    waits = iter([False, False, True])

    def may_end(_step_id):
        bench.time_s += 1.0
        return next(waits)

    bench.worker.may_end = may_end
    bench.run()
    ages = [round(m.step_age_s, 2) for m in bench.sent(wire.Heartbeat)]
    assert 1.0 in ages
    assert 2.0 in ages
    assert bench.loop.progress.step_since_s == 0.0


def test_heartbeat_carries_levels_under_the_names_of_the_metrics():
    stats = Bench().run().sent(wire.Heartbeat)[-1].stats
    assert stats["num_running_reqs"] == 0
    assert stats["token_usage"] == 0.2
    assert stats["step_seconds"]["decode"]["count"] == 4


def test_invariants_are_checked_when_the_loop_becomes_idle():
    bench = Bench(messages=[wire.SubmitBatch(requests=[request(1)])])

    def end_after_idle(timeout, flags):
        bench.socket_in.frames.append(wire.encode(wire.Shutdown()))
        return 1

    bench.socket_in.poll = end_after_idle
    bench.run()
    assert bench.events.index("check") > bench.events.index("apply 4")
    assert bench.events.count("check") == 1


def test_state_query_shows_the_order_of_steps():
    bench = Bench(messages=[wire.SubmitBatch(requests=[request(1)])])
    queue = [wire.StateQuery(query_id=3), wire.Shutdown()]

    def ask(timeout, flags):
        bench.socket_in.frames.append(wire.encode(queue.pop(0)))
        return 1

    bench.socket_in.poll = ask
    reply = bench.run().sent(wire.Reply)[0]
    assert reply.query_id == 3
    steps = reply.payload["recent_steps"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    assert steps[1]["launch_order"] < steps[0]["apply_order"]
