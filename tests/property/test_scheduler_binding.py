"""The scheduler through the extension: buffers, bytes, errors, and the same tokens in any order."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsserve import _native

EOS = 1
VOCAB = 50


def build(**changes: Any) -> _native.Scheduler:
    config = {
        "page_size": 4,
        "num_pages": 40,
        "max_running_requests": 4,
        "chunked_prefill_size": 24,
        "context_length": 128,
        "window": 8,
        "vocab_size": VOCAB,
        "conservativeness": 0.0,
        "eos_token_ids": [EOS],
    }
    return _native.Scheduler(json.dumps(config | changes))


def buffer_set(capacity: dict[str, int]) -> dict[str, np.ndarray]:
    requests, rows = capacity["requests"], capacity["rows"]
    per_request = (
        "request_slot start_position cached_len replay_len tail_len draft_len window_floor "
        "write_floor tail_floor"
    )
    arrays = {name: np.zeros(requests, np.int32) for name in per_request.split()}
    return arrays | {
        "header": np.zeros(16, np.int64),
        "request_id": np.zeros(requests, np.uint64),
        "cu_seqlens": np.zeros(requests + 1, np.int32),
        "samples": np.zeros(requests, np.uint8),
        "history_ids": np.zeros((requests, 3), np.int32),
        "token_ids": np.zeros(rows, np.int32),
        "positions": np.zeros(rows, np.int32),
        "page_deltas": np.zeros((capacity["deltas"], 3), np.int32),
        "released_slots": np.zeros(capacity["slots"], np.int32),
    }


def registered(**changes: Any) -> tuple[_native.Scheduler, list[dict[str, np.ndarray]]]:
    scheduler = build(**changes)
    sets = [buffer_set(scheduler.plan_capacity()) for _ in range(3)]
    scheduler.register_buffers(sets)
    return scheduler, sets


def spec(request_id: int, prompt: list[int], max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    ids = np.array(prompt, np.uint32).tobytes()
    return {
        "request_id": request_id,
        "token_ids": ids,
        "max_new_tokens": max_new_tokens,
    } | fields


def next_token(request_id: int, position: int) -> int:
    return 1 + (request_id * 7919 + position * 104729) % 1009 % (VOCAB - 1)


class Runner:
    """A loop that plans `depth` steps ahead; the device is a function of request and position."""

    def __init__(self, depth: int, **changes: Any) -> None:
        self.scheduler, self.sets = registered(**changes)
        self.depth = depth
        self.launched: list[tuple[int, np.ndarray]] = []
        self.tokens: dict[int, list[int]] = {}
        self.codes: dict[int, int] = {}
        self.num_planned = 0

    def step(self) -> None:
        while len(self.launched) < self.depth and self.launch():
            pass
        if self.launched:
            step_id, ids = self.launched.pop(0)
            status = np.zeros(len(ids), np.uint8)
            self.take(self.scheduler.apply(step_id, ids, status, 0))
        self.take(self.scheduler.take_outputs())
        self.scheduler.check_invariants()

    def launch(self) -> bool:
        index = self.num_planned % 3
        summary = self.scheduler.next_plan(index, 0)
        if summary is None:
            return False
        self.num_planned += 1
        plan = self.sets[index]
        size = summary.num_requests
        assert plan["header"][0] == summary.step_id
        assert plan["header"][2] == size
        assert plan["header"][3] == summary.num_rows == plan["cu_seqlens"][size]
        assert plan["header"][7] == plan["samples"][:size].sum()
        assert plan["header"][8] == plan["positions"][: summary.num_rows].max() + 1
        last = plan["cu_seqlens"][1 : size + 1] - 1
        ids = [
            next_token(int(request_id), int(position)) if samples else -1
            for request_id, position, samples in zip(
                plan["request_id"][:size],
                plan["positions"][last],
                plan["samples"][:size],
                strict=True,
            )
        ]
        self.launched.append((summary.step_id, np.array(ids, np.int32)))
        return True

    def take(self, outputs: _native.StepOutputs) -> None:
        ids = np.frombuffer(outputs.request_ids, "<u8")
        offsets = np.frombuffer(outputs.token_offsets, "<u4")
        tokens = np.frombuffer(outputs.token_ids, "<u4")
        output_lens = np.frombuffer(outputs.output_lens, "<u4")
        assert len(ids) == outputs.len == len(offsets) - 1 == len(outputs.finish_codes)
        for index, request_id in enumerate(ids.tolist()):
            assert request_id not in self.codes, "nothing comes after the end"
            mine = self.tokens.setdefault(request_id, [])
            mine += tokens[offsets[index] : offsets[index + 1]].tolist()
            assert output_lens[index] == len(mine)
            if outputs.finish_codes[index]:
                self.codes[request_id] = outputs.finish_codes[index]

    def drain(self) -> None:
        self.step()
        while self.scheduler.has_work():
            self.step()


prompts = st.lists(st.integers(2, 3), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(0, 30), st.booleans()), max_size=8),
    mixed_chunk=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm"]),
)
def test_tokens_do_not_depend_on_overlap_or_batch(
    requests: list[tuple[list[int], int, bool]], mixed_chunk: bool, policy: str
) -> None:
    specs = [
        spec(index, prompt, limit, ignore_eos=ignore_eos)
        for index, (prompt, limit, ignore_eos) in enumerate(requests)
    ]
    results = []
    for depth, max_running in ((1, 1), (1, 4), (2, 4)):
        runner = Runner(
            depth, max_running_requests=max_running, mixed_chunk=mixed_chunk, policy=policy
        )
        assert runner.scheduler.submit(specs) == []
        runner.drain()
        assert runner.codes.keys() == set(range(len(specs)))
        assert runner.scheduler.flush() == (True, [])
        assert {pool["free"] == pool["capacity"] for pool in runner.scheduler.pool_table()} == {
            True
        }
        results.append((runner.tokens, runner.codes))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("field", "array", "words"),
    [
        ("token_ids", None, "token_ids is missing"),
        ("token_ids", np.zeros(1000, np.int64), "token_ids must be a 1-dimensional array"),
        ("samples", np.zeros((4, 1), np.uint8), "samples must be a 1-dimensional array"),
        ("positions", np.zeros(3, np.int32), "positions has 3 entries, needs 24"),
        ("positions", np.zeros(100, np.int32)[::2], "positions must be C-contiguous"),
        ("history_ids", np.zeros((4, 4), np.int32), "history_ids has shape"),
        ("page_deltas", np.zeros((3, 500), np.int32).T, "page_deltas must be C-contiguous"),
    ],
)
def test_wrong_buffers_are_refused_by_name(field: str, array: Any, words: str) -> None:
    scheduler = build()
    sets = [buffer_set(scheduler.plan_capacity()) for _ in range(3)]
    if array is None:
        del sets[1][field]
    else:
        sets[1][field] = array
    with pytest.raises(_native.SchedulerError, match="buffer set 1: " + words):
        scheduler.register_buffers(sets)


def test_read_only_buffers_are_refused() -> None:
    scheduler = build()
    sets = [buffer_set(scheduler.plan_capacity()) for _ in range(3)]
    sets[2]["header"].setflags(write=False)
    with pytest.raises(_native.SchedulerError, match="set 2: header must be writable"):
        scheduler.register_buffers(sets)
    with pytest.raises(_native.SchedulerError, match="2 buffer sets given, 3 needed"):
        scheduler.register_buffers(sets[:2])


def test_a_plan_that_cannot_be_handed_over_ends_the_scheduler() -> None:
    scheduler, sets = registered()
    scheduler.submit([spec(1, [5, 6, 7], 4)])
    sets[0]["positions"].setflags(write=False)
    with pytest.raises(_native.InvariantError, match="step 1 could not be handed over"):
        scheduler.next_plan(0, 0)
    with pytest.raises(_native.InvariantError):
        scheduler.next_plan(1, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": None}, "max_new_tokens is missing"),
        ({"token_ids": b"abc"}, "token_ids has 3 bytes"),
        ({"token_ids": [1, 2]}, "token_ids must be bytes"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"max_tokens": 3}, "unknown request key max_tokens"),
    ],
)
def test_malformed_requests_queue_nothing(changes: dict[str, Any], words: str) -> None:
    scheduler, _ = registered()
    with pytest.raises(_native.SchedulerError, match=words):
        scheduler.submit([spec(1, [2, 3], 4), spec(2, [2, 3], 4) | changes])
    assert not scheduler.has_work()


def test_refused_requests_come_back_with_code_and_message() -> None:
    scheduler, _ = registered()
    refused = scheduler.submit([spec(1, [2, 3], 4), spec(2, [], 4), spec(3, [2] * 100, 100)])
    assert [(request_id, code) for request_id, code, _ in refused] == [
        (2, "empty_prompt"),
        (3, "context_length_exceeded"),
    ]
    assert "200 exceed the context length of 128" in refused[1][2]


def test_wrong_configuration_is_refused() -> None:
    with pytest.raises(_native.SchedulerError, match="chunked_prefill_size is 3"):
        build(chunked_prefill_size=3)
    with pytest.raises(_native.SchedulerError, match="unknown field"):
        build(page_sise=3)


def test_order_of_steps_and_sets_is_enforced() -> None:
    scheduler, _ = registered()
    ids, status = np.full(1, 5, np.int32), np.zeros(1, np.uint8)
    with pytest.raises(_native.SchedulerError, match="set 3 is not registered"):
        scheduler.next_plan(3, 0)
    with pytest.raises(_native.SchedulerError, match="cannot be applied"):
        scheduler.apply(1, ids, status, 0)
    scheduler.submit([spec(1, [2, 3], 9)])
    first = scheduler.next_plan(0, 0)
    assert first is not None
    with pytest.raises(_native.SchedulerError, match="set 0 belongs to a step in flight"):
        scheduler.next_plan(0, 0)
    assert scheduler.next_plan(1, 0) is not None
    with pytest.raises(_native.SchedulerError, match="2 steps are in flight"):
        scheduler.next_plan(2, 0)
    with pytest.raises(_native.SchedulerError, match="1 requests, the results have 2"):
        scheduler.apply(first.step_id, np.full(2, 5, np.int32), np.zeros(2, np.uint8), 0)
    assert scheduler.apply(first.step_id, ids, status, 0).len == 1
    assert scheduler.next_plan(0, 0) is not None


def test_abort_and_stop_string_end_through_take_outputs() -> None:
    runner = Runner(2)
    runner.scheduler.submit([spec(1, [2] * 9, 20, ignore_eos=True), spec(2, [3] * 9, 20)])
    for _ in range(4):
        runner.step()
    assert runner.scheduler.flush() == (False, [1, 2])
    runner.scheduler.finish(1, 2)
    runner.scheduler.abort([2, 99])
    outputs = runner.scheduler.take_outputs()
    assert list(outputs.finish_codes) == [2, 4]
    assert np.frombuffer(outputs.output_lens, "<u4")[0] == 2
    assert runner.scheduler.take_outputs().len == 0
    runner.drain()
    assert runner.scheduler.flush() == (True, [])


def test_stats_count_and_pools_add_up() -> None:
    runner = Runner(1)
    runner.scheduler.submit([spec(1, [2] * 30, 5, ignore_eos=True)])
    runner.drain()
    stats = runner.scheduler.stats()
    assert stats["finished_length_total"] == stats["admitted_total"] == 1
    assert stats["generated_tokens_total"] == 5
    assert stats["num_running"] == stats["num_waiting"] == 0
    names = [pool["name"] for pool in runner.scheduler.pool_table()]
    assert names == ["full", "window", "req_slots"]
    for pool in runner.scheduler.pool_table():
        states = ("free", "evictable", "locked", "private", "quarantined")
        assert sum(pool[state] for state in states) == pool["capacity"]


def test_runs_of_drafts_cross_as_one_array_with_their_lengths() -> None:
    scheduler, sets = registered(draft_len=2)
    scheduler.submit([spec(1, [5] * 9, 20, ignore_eos=True), spec(2, [6] * 9, 20, ignore_eos=True)])
    prefill = scheduler.next_plan(0, 0)
    verify = scheduler.next_plan(1, 0)
    assert prefill is not None
    assert verify is not None
    assert (verify.phase, verify.num_rows, verify.num_draft_tokens) == (3, 6, 4)
    assert sets[1]["header"][11] == 4
    ids, status = np.array([7, 7], np.int32), np.zeros(2, np.uint8)
    scheduler.apply(prefill.step_id, ids, status, 0)
    counts = np.array([3, 1], np.uint32)
    with pytest.raises(_native.SchedulerError, match="results have 2"):
        scheduler.apply(verify.step_id, ids, status, 0, counts)
    runs = np.array([8, 9, 10, 11], np.int32)
    outputs = scheduler.apply(verify.step_id, runs, status, 0, num_ids=counts)
    assert np.frombuffer(outputs.token_offsets, np.uint32).tolist() == [0, 3, 4]
    assert np.frombuffer(outputs.token_ids, np.uint32).tolist() == [8, 9, 10, 11]
    assert np.frombuffer(outputs.output_lens, np.uint32).tolist() == [4, 2]
    assert scheduler.stats()["accepted_tokens_total"] == 2
    scheduler.check_invariants()


def test_a_prompt_crosses_in_parts() -> None:
    scheduler, sets = registered()
    spec_of_part = spec(1, [5, 6], 20, prompt_len=6)
    assert scheduler.submit([spec_of_part]) == []
    assert scheduler.next_plan(0, 0) is None
    assert scheduler.extend_prompt(1, np.array([7, 8], np.uint32)) is None
    every_other = np.array([9, 0, 10, 0], np.uint32)[::2]
    with pytest.raises(_native.SchedulerError, match="contiguous"):
        scheduler.extend_prompt(1, every_other)
    assert scheduler.extend_prompt(1, every_other.copy()) is None
    summary = scheduler.next_plan(0, 0)
    assert summary is not None
    assert sets[0]["token_ids"][:6].tolist() == [5, 6, 7, 8, 9, 10]
    scheduler.submit([spec(2, [], 20, prompt_len=6)])
    refused = scheduler.extend_prompt(2, np.array([2**31], np.uint32))
    assert refused is not None
    assert refused[:2] == (2, "invalid_token_id")
    assert scheduler.extend_prompt(77, np.array([5], np.uint32)) is None


def test_a_request_says_how_many_drafts_it_wants() -> None:
    scheduler, sets = registered(draft_len=2)
    specs = [spec(1, [5] * 7, 20), spec(2, [6] * 7, 20, draft_len=0)]
    assert scheduler.submit([*specs, spec(3, [7] * 7, 20, draft_len=None)]) == []
    (refused,) = scheduler.submit([spec(4, [5] * 9, 20, draft_len=3)])
    assert refused[:2] == (4, "invalid_draft_len")
    with pytest.raises(_native.SchedulerError, match="draft_len"):
        scheduler.submit([spec(4, [5] * 9, 20, draft_len=-1)])
    scheduler.next_plan(0, 0)
    verify = scheduler.next_plan(1, 0)
    assert verify is not None
    assert (verify.phase, verify.num_draft_tokens) == (3, 4)
    assert sets[1]["draft_len"][:3].tolist() == [2, 0, 2]


def test_plans_carry_the_group_and_a_digest_that_changes_with_the_page_table() -> None:
    scheduler, sets = registered(group_id=3)
    scheduler.submit([spec(1, [5] * 9, 20, ignore_eos=True)])
    digests = set()
    for index in range(3):
        summary = scheduler.next_plan(index, 0)
        assert summary is not None
        assert sets[index]["header"][10] == 3
        digests.add(int(sets[index]["header"][9]))
        scheduler.apply(summary.step_id, np.array([7], np.int32), np.zeros(1, np.uint8), 0)
    assert len(digests) == 3


def test_requests_carry_priority_tenant_and_deadline() -> None:
    scheduler, _ = registered(priority={"enabled": True}, fair=True, max_running_requests=1)
    requests = [
        spec(1, [5] * 8, 4, priority=-1, tenant=2**64 - 1),
        spec(2, [6] * 8, 4, priority=1, tenant=0),
        spec(3, [7] * 8, 4, deadline_us=10),
    ]
    assert scheduler.submit(requests) == []
    first = scheduler.next_plan(0, 10)
    assert first is not None
    assert first.admitted == [2]
    outputs = scheduler.take_outputs()
    assert np.frombuffer(outputs.request_ids, np.uint64).tolist() == [3]
    assert list(outputs.finish_codes) == [8]
    with pytest.raises(_native.SchedulerError, match="tenant"):
        scheduler.submit([spec(4, [5], 1, tenant=-1)])
