"""The fake model must find what a wrong scheduler would do to the cache; each test breaks one rule."""

import threading

import pytest

from dsserve.protocol.engine import Script
from dsserve.worker.base import PHASE_DECODE, STATUS_NAN
from dsserve.worker.fake import DeviceFault
from dsserve.worker.fake_model import fake_output
from dsserve.worker.fake_plan import SlotCheckError
from fake_bench import PROMPT, Bench, generate


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.worker.close()


def test_right_plans_pass_and_give_the_hashed_ids(bench):
    assert generate(bench, 12) == fake_output(PROMPT, 12)


def test_ids_do_not_depend_on_batch_mates(bench):
    other = [40 + i for i in range(20)]
    bench.admit(1, PROMPT)
    bench.admit(2, other)
    both = bench.run(bench.prefill(1, 1, PROMPT, 0, 13), bench.prefill(2, 2, other, 0, 20))
    assert both.token_ids.tolist() == fake_output(PROMPT, 1) + fake_output(other, 1)
    both = bench.run(bench.decode(2, 2, 20, tail_floor=12), bench.decode(1, 1, 13, tail_floor=5))
    assert both.token_ids.tolist() == fake_output(other, 2)[1:] + fake_output(PROMPT, 2)[1:]


def test_steps_launched_before_the_last_ended_find_its_ids_in_the_token_ring(bench):
    bench.admit(1, PROMPT)
    handles = [bench.launch(bench.prefill(1, 1, PROMPT, 0, 13))]
    handles.append(bench.launch(bench.decode(1, 1, 13, tail_floor=5)))
    handles.append(bench.launch(bench.decode(1, 1, 14, tail_floor=5)))
    assert [int(h.wait().token_ids[0]) for h in handles] == fake_output(PROMPT, 3)


def test_hit_with_replay_passes_and_leaves_shared_pages_alone(bench):
    long = [10 + i for i in range(20)]
    generate(bench, 1, long)
    other = [*long[:12], 70, 71, 72]
    bench.admit(2, other)
    shared = bench.tables[1][:3]
    result = bench.run(bench.prefill(2, 2, other, 4, 15, hit=12, shared=shared))
    assert result.token_ids.tolist() == fake_output(other, 1)
    row = bench.decode(2, 2, 15, hit=12, tail_floor=7)
    assert bench.run(row).token_ids.tolist() == fake_output(other, 2)[1:]


def test_chunks_without_tail_then_a_last_chunk_pass(bench):
    prompt = [10 + i for i in range(21)]
    bench.admit(1, prompt)
    bench.run(bench.prefill(1, 1, prompt, 0, 4, is_last=False))
    bench.run(bench.prefill(1, 1, prompt, 4, 12, is_last=False))
    result = bench.run(bench.prefill(1, 1, prompt, 12, 21))
    assert result.token_ids.tolist() == fake_output(prompt, 1)


def test_resumed_request_brings_its_output_in_a_new_slot(bench):
    out = generate(bench, 4)
    ids = [*PROMPT, *out]
    result = bench.run(bench.prefill(1, 2, ids, 0, len(ids)), released=[1])
    assert result.token_ids.tolist() == fake_output(PROMPT, 5)[4:]


# From here on: one rule broken at a time.


def fails(bench, match, *rows, **header):
    with pytest.raises(SlotCheckError, match=match):
        bench.run(*rows, **header)


def test_finds_a_wrong_token(bench):
    bench.admit(1, PROMPT)
    row = bench.prefill(1, 1, PROMPT, 0, 13)
    row["ids"][5] += 1
    fails(bench, "row at position 5 has token", row)


@pytest.mark.parametrize("slot", [1, 2])
def test_finds_a_placeholder_that_was_not_sampled_since_the_slot_was_taken(bench, slot):
    ids = [*PROMPT, *generate(bench, 1)]
    bench.tables.clear()
    row = bench.prefill(1, slot, ids, 0, 14)
    row["ids"][-1] = -1
    fails(bench, r"row at position 13 has token -?\d+ \(plan -1\)", row, released=[1])


def test_finds_a_slot_taken_over_with_the_pages_of_its_last_request(bench):
    generate(bench, 1)
    bench.admit(2, PROMPT)
    row = bench.prefill(2, 1, PROMPT, 0, 13)
    assert row["deltas"] == []
    fails(bench, "written to page 0", row, released=[1])


def test_finds_decoder_windows_that_only_the_last_request_of_the_slot_wrote(bench):
    generate(bench, 1)
    bench.tables.clear()
    bench.run(bench.prefill(1, 1, PROMPT, 0, 12, is_last=False), released=[1])
    fails(bench, "decoder window entry", bench.prefill(1, 1, PROMPT, 12, 13))


def test_finds_a_page_that_comes_back_with_other_content(bench):
    generate(bench, 1)
    generate(bench, 1, request_id=2, slot=2)
    first, copy = bench.tables[1][1], bench.tables[2][1]
    other = [60 + i for i in range(9)]
    bench.admit(3, other)
    row = bench.prefill(3, 3, other, 0, 9)
    bench.run(row | {"deltas": [(1, 1, copy), (3, 0, first), *row["deltas"][1:]]})
    row = bench.decode(1, 1, 13, tail_floor=5) | {"deltas": [(1, 1, first)]}
    fails(bench, f"FULL column 1 is page {first}", row)


def test_finds_a_skipped_position(bench):
    generate(bench, 1)
    bench.run(bench.decode(1, 1, 13, tail_floor=5))
    fails(bench, "start_position is 15, must be 14", bench.decode(1, 1, 15, tail_floor=5))


def test_finds_a_missing_page(bench):
    bench.admit(1, PROMPT)
    row = bench.prefill(1, 1, PROMPT, 0, 13)
    row["deltas"] = row["deltas"][:-1]
    fails(bench, "written to page 0", row)


def test_finds_a_page_of_another_request(bench):
    generate(bench, 1)
    other = [60 + i for i in range(20)]
    bench.admit(2, other)
    row = bench.prefill(2, 2, other, 4, 20, hit=12, shared=bench.tables[1][:3])
    fails(bench, "FULL column 0 is page 1, whose row 0 must hold position 0, token 60", row)


def test_finds_pages_in_the_wrong_order(bench):
    long = [10 + i for i in range(20)]
    generate(bench, 1, long)
    bench.admit(2, long[:15])
    first, second, third = bench.tables[1][:3]
    row = bench.prefill(2, 2, long[:15], 4, 15, hit=12, shared=[second, first, third])
    fails(bench, "must hold position 0, token 10; it holds position 4", row)


def test_finds_a_write_into_a_shared_page(bench):
    generate(bench, 1)
    bench.admit(2, PROMPT)
    row = bench.prefill(2, 2, PROMPT, 0, 13)
    row["deltas"] = [(2, 0, bench.tables[1][0]), *row["deltas"][1:]]
    fails(bench, r"tables of slots \[1, 2\]", row)


def test_finds_a_page_that_was_given_away_while_still_in_use(bench):
    generate(bench, 1)
    other = [60 + i for i in range(9)]
    bench.admit(2, other)
    stolen = bench.tables[1][1]
    bench.tables[1][1] = bench.next_page
    bench.tables[2] = [stolen]
    bench.next_page += 1
    row = bench.prefill(2, 2, other, 0, 9)
    row["deltas"] += [(1, 1, bench.tables[1][1]), (2, 0, stolen)]
    bench.run(row)
    fails(bench, "FULL column 1", bench.decode(1, 1, 13, tail_floor=5))


def test_finds_a_hit_without_replay(bench):
    long = [10 + i for i in range(20)]
    generate(bench, 1, long)
    bench.admit(2, long)
    row = bench.prefill(2, 2, long, 12, 20, hit=12, shared=bench.tables[1][:3])
    fails(bench, "must replay 8 rows, not 0", row)


def test_finds_a_hit_within_the_window(bench):
    long = [10 + i for i in range(20)]
    generate(bench, 1, long)
    bench.admit(2, long)
    row = bench.prefill(2, 2, long, 0, 20, hit=8, shared=bench.tables[1][:2])
    fails(bench, "a hit of 8 tokens must not be taken", row)


def test_finds_a_lowered_write_floor(bench):
    long = [10 + i for i in range(20)]
    generate(bench, 1, long)
    bench.admit(2, long)
    shared = bench.tables[1][:3]
    row = bench.prefill(2, 2, long, 4, 20, hit=12, shared=shared, write_floor=8)
    fails(bench, "write_floor is 8, must be 12", row)


def test_finds_a_window_floor_below_what_was_replayed(bench):
    long = [10 + i for i in range(20)]
    generate(bench, 1, long)
    bench.admit(2, long)
    shared = bench.tables[1][:3]
    row = bench.prefill(2, 2, long, 4, 20, hit=12, shared=shared, window_floor=0)
    fails(bench, "window_floor is 0, must be 4", row)


def test_finds_a_last_chunk_too_short_for_the_decoder_window(bench):
    prompt = [10 + i for i in range(15)]
    bench.admit(1, prompt)
    bench.run(bench.prefill(1, 1, prompt, 0, 12, is_last=False))
    fails(bench, "decoder window entry", bench.prefill(1, 1, prompt, 12, 15))


def test_finds_a_tail_floor_that_hides_rows(bench):
    prompt = [10 + i for i in range(20)]
    bench.admit(1, prompt)
    row = bench.prefill(1, 1, prompt, 0, 20, tail_floor=13)
    fails(bench, "tail_floor 13", row)


def test_finds_a_tail_floor_that_changes_during_decode(bench):
    generate(bench, 2)
    fails(bench, "the tail floor before was 5", bench.decode(1, 1, 14, tail_floor=6))


def test_finds_an_open_chunk_that_ends_inside_a_page(bench):
    bench.admit(1, PROMPT)
    row = bench.prefill(1, 1, PROMPT, 0, 6, is_last=False)
    fails(bench, "ends inside a page", row)


def test_finds_a_slot_that_was_not_released(bench):
    generate(bench, 1)
    bench.admit(2, PROMPT)
    fails(bench, "slot is not free", bench.prefill(2, 1, PROMPT, 0, 13))


def test_finds_a_request_in_two_slots(bench):
    generate(bench, 1)
    fails(bench, "also holds slot 1", bench.prefill(1, 2, PROMPT, 0, 13))


def test_finds_a_request_the_worker_was_not_told_of(bench):
    fails(bench, "not told of this request", bench.prefill(1, 1, PROMPT, 0, 13))


def test_finds_wrong_history(bench):
    prompt = [10 + i for i in range(20)]
    bench.admit(1, prompt)
    bench.run(bench.prefill(1, 1, prompt, 0, 8, is_last=False))
    row = bench.prefill(1, 1, prompt, 8, 20, history=[-1, -1, -1])
    fails(bench, r"history_ids \[-1, -1, -1\], must be \[15, 16, 17\]", row)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"tail": 3}, "3 tail rows"),
        ({"sampling": 0}, "0 sampling rows"),
        ({"max_len": 99}, "99 positions at most"),
        ({"phase": PHASE_DECODE}, "DECODE step with more than one row"),
        ({"rows": 12}, "do not divide 12 rows"),
    ],
)
def test_finds_a_header_that_contradicts_the_plan(bench, header, match):
    bench.admit(1, PROMPT)
    fails(bench, match, bench.prefill(1, 1, PROMPT, 0, 13), **header)


def test_finds_a_buffer_set_rewritten_while_its_step_waits():
    bench = Bench(base_us=1.0)
    may_go = threading.Event()
    bench.worker._sleep = lambda _s: may_go.wait()
    bench.admit(1, PROMPT)
    bench.launch(bench.prefill(1, 1, PROMPT, 0, 13))
    waiting = bench.launch(bench.decode(1, 1, 13, tail_floor=5))
    bench.step_id += 2
    bench.launch(bench.decode(1, 1, 14, tail_floor=5))
    may_go.set()
    with pytest.raises(SlotCheckError, match="buffer set of step 2 was rewritten for step 5"):
        waiting.wait()
    bench.worker.close()


# Scripts and times.


def test_script_replaces_ids_then_hashing_goes_on(bench):
    bench.admit(1, PROMPT, Script(ids=[100, 101]))
    result = bench.run(bench.prefill(1, 1, PROMPT, 0, 13))
    out = [int(result.token_ids[0])]
    for i in range(2):
        result = bench.run(bench.decode(1, 1, 13 + i, tail_floor=5))
        out.append(int(result.token_ids[0]))
    assert out == [100, 101, *fake_output([*PROMPT, 100, 101], 1)]


def test_script_marks_one_token_as_not_a_number(bench):
    bench.admit(1, PROMPT, Script(nan_at=1))
    assert bench.run(bench.prefill(1, 1, PROMPT, 0, 13)).status.tolist() == [0]
    assert bench.run(bench.decode(1, 1, 13, tail_floor=5)).status.tolist() == [STATUS_NAN]


def test_script_makes_the_device_fail(bench):
    bench.admit(1, PROMPT, Script(fault_at=0))
    with pytest.raises(DeviceFault, match="request 1 in slot 1"):
        bench.run(bench.prefill(1, 1, PROMPT, 0, 13))


def test_step_takes_its_configured_time():
    bench = Bench(base_us=100, row_us=10, pair_us=1)
    bench.admit(1, PROMPT, Script(delays_us=[5000]))
    bench.run(bench.prefill(1, 1, PROMPT, 0, 13))
    assert bench.slept == [pytest.approx((100 + 130 + 13 * 14 / 2 + 5000) * 1e-6)]
    bench.worker.close()
