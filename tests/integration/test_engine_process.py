"""The engine process with the fake model, over real sockets: what a client of it may rely on."""

import asyncio
import itertools
import random

import pytest

from dsserve.errors import ContextTooLong, DsserveError, InvalidRequest, NotReady, Overloaded
from dsserve.protocol import engine as wire
from dsserve.protocol.engine import FinishCode
from dsserve.worker.fake_model import fake_output
from engine_process import EOS, assert_idle, pool_units, read, running_engine


def prompts(count, seed=0, longest=150):
    """Random prompts, many of which begin like another one."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 97) for _ in range(longest)] for _ in range(6)]
    for _ in range(count):
        stem = rng.choice(stems)
        tail = [rng.randrange(3, 97) for _ in range(rng.randrange(1, 30))]
        yield stem[: rng.randrange(0, longest)] + tail


async def test_many_requests_at_once_get_their_own_ids():
    jobs = [(prompt, 1 + i % 40) for i, prompt in enumerate(prompts(200))]
    async with running_engine() as engine:
        results = await asyncio.gather(*(engine.generate(p, n) for p, n in jobs))
        for (prompt, count), (ids, code) in zip(jobs, results, strict=True):
            assert ids == fake_output(prompt, count)
            assert code is FinishCode.LENGTH
        state = await engine.idle_state()
        assert_idle(state)
        assert state["stats"]["cached_tokens_total"] > 0


async def run_jobs(jobs, **flags):
    async with running_engine(**flags) as engine:
        results = await asyncio.gather(*(engine.generate(p, n, **fields) for p, n, fields in jobs))
        return results, await engine.idle_state()


async def test_plain_loop_and_overlapped_loop_give_the_same_tokens():
    """With stops in mid batch, hits, retractions and chunks."""
    jobs = []
    for i, prompt in enumerate(prompts(80, seed=1)):
        fields = {}
        if i % 3 == 0:
            fields["stop_token_ids"] = wire.pack_u32([3 + i % 94, 50])
        if i % 7 == 0:
            script = {"ids": [*range(10, 10 + i % 5), EOS]}
            fields["custom_params"] = {"script": script}
        jobs.append((prompt, 60, fields))
    flags = {"max_total_tokens": 1024, "chunked_prefill_size": 64}
    overlapped, state = await run_jobs(jobs, **flags)
    plain, plain_state = await run_jobs(jobs, disable_overlap_schedule=True, **flags)
    assert overlapped == plain
    assert state["is_overlapped"]
    assert not plain_state["is_overlapped"]
    assert state["stats"]["retracted_total"] > 0
    codes = {code for _, code in plain}
    assert codes == {FinishCode.LENGTH, FinishCode.STOP_TOKEN}


@pytest.mark.parametrize("is_overlapped", [True, False])
async def test_next_step_is_launched_before_the_last_is_applied_only_with_overlap(is_overlapped):
    async with running_engine(disable_overlap_schedule=not is_overlapped) as engine:
        await engine.generate([5] * 20, 30)
        steps = (await engine.idle_state())["recent_steps"]
    assert len(steps) == 30
    orders = [
        after["launch_order"] < before["apply_order"] for before, after in itertools.pairwise(steps)
    ]
    assert orders == [is_overlapped] * 29
    in_flight = [
        sum(s["launch_order"] <= step["launch_order"] < s["apply_order"] for s in steps)
        for step in steps
    ]
    assert max(in_flight) == (2 if is_overlapped else 1)


async def test_stop_token_ends_a_request_though_its_next_step_was_launched():
    script = {"ids": [10, 11, EOS, 12]}
    async with running_engine() as engine:
        ids, code = await engine.generate([5] * 20, 30, custom_params={"script": script})
        assert (ids, code) == ([10, 11, EOS], FinishCode.STOP_TOKEN)
        ids, code = await engine.generate(
            [5] * 20, 5, custom_params={"script": script}, ignore_eos=True
        )
        assert ids[:4] == script["ids"]
        assert code is FinishCode.LENGTH
        assert_idle(await engine.idle_state())


async def test_request_before_ready_is_refused():
    async with running_engine(wait_ready=False) as engine:
        with pytest.raises(NotReady):
            engine.submit([5])
        await engine.client.wait_ready()


async def test_rejections_are_typed_errors_and_leave_the_engine_alone():
    async with running_engine(
        max_running_requests=1, max_queued_requests=2, fake={"base_us": 2000}
    ) as engine:
        for prompt, count, error in (
            ([], 5, InvalidRequest),
            ([5] * 600, 5, ContextTooLong),
            ([5, 512], 5, InvalidRequest),
        ):
            with pytest.raises(error):
                await engine.submit(prompt, count).accepted()
        with pytest.raises(InvalidRequest, match="custom_params"):
            await engine.generate([5], 5, custom_params={"script": {"id": [1]}})
        streams = [engine.submit([5] * 20, 200) for _ in range(8)]
        answers = await asyncio.gather(
            *(stream.accepted() for stream in streams), return_exceptions=True
        )
        assert any(isinstance(answer, Overloaded) for answer in answers)
        assert answers[0] is None
        engine.client.abort_all()
        for stream, answer in zip(streams, answers, strict=True):
            if answer is None:
                assert (await read(stream))[1] is FinishCode.ABORT
        assert_idle(await engine.idle_state())


async def test_abort_ends_a_stream_with_a_last_delta():
    async with running_engine(fake={"base_us": 1000}) as engine:
        stream = engine.submit([5] * 20, 400)
        first = await anext(stream)
        engine.client.abort(stream.request_id)
        ids, code = await read(stream)
        assert code is FinishCode.ABORT
        received = first.token_ids + ids
        assert received == fake_output([5] * 20, len(received))
        engine.client.abort(stream.request_id)
        assert_idle(await engine.idle_state())


async def test_finish_keeps_the_ids_before_a_stop_string_only():
    async with running_engine(fake={"base_us": 1000}) as engine:
        stream = engine.submit([5] * 20, 400)
        ids = []
        async for delta in stream:
            ids += delta.token_ids
            if len(ids) >= 10 and delta.finish_code is FinishCode.NONE:
                engine.client.finish(stream.request_id, 4)
            last = delta
        assert last.finish_code is FinishCode.STOP_STRING
        assert last.output_len == 4
        assert_idle(await engine.idle_state())
        # What was cut off is not in the prefix cache either, so a hit gives the same ids as before.
        prompt = [5] * 20 + fake_output([5] * 20, 30)
        assert (await engine.generate(prompt, 5))[0] == fake_output(prompt, 5)


async def test_not_a_number_ends_that_request_only():
    async with running_engine() as engine:
        bad = engine.generate([5] * 20, 30, custom_params={"script": {"nan_at": 3}})
        (_, bad_code), (ids, code) = await asyncio.gather(bad, engine.generate([6] * 20, 30))
        assert bad_code is FinishCode.ERROR_NAN
        assert code is FinishCode.LENGTH
        assert ids == fake_output([6] * 20, 30)
        assert_idle(await engine.idle_state())


async def test_flush_empties_an_idle_cache_and_names_the_holders_otherwise():
    async with running_engine(fake={"base_us": 1000}) as engine:
        await engine.generate([5] * 100, 5)
        state = await engine.idle_state()
        assert pool_units(state)["evictable"] > 0
        stream = engine.submit([6] * 20, 400)
        await anext(stream)
        assert await engine.client.flush() == (False, [stream.request_id])
        stream.close()
        await engine.idle_state()
        assert await engine.client.flush() == (True, [])
        state = await engine.idle_state()
        assert pool_units(state)["free"] == pool_units(state)["capacity"]


async def test_random_disconnects_leak_nothing():
    """1,000 requests, two in three of which lose their client at a random moment."""
    rng = random.Random(2)
    async with running_engine(max_total_tokens=2048, chunked_prefill_size=128) as engine:
        room = asyncio.Semaphore(100)

        async def one(prompt):
            count = rng.randrange(1, 60)
            leave_after = rng.choice([None, 0, rng.randrange(1, 20)])
            async with room:
                stream = engine.submit(prompt, count)
                received = []
                async with stream:
                    if leave_after == 0:
                        return
                    async for delta in stream:
                        received += delta.token_ids
                        if leave_after is not None and len(received) >= leave_after:
                            break
                assert received == fake_output(prompt, len(received))
                if leave_after is None:
                    assert len(received) == count

        await asyncio.gather(*(one(prompt) for prompt in prompts(1000, seed=3)))
        assert engine.client.num_open_requests == 0
        state = await engine.idle_state()
        assert_idle(state)
        stats = state["stats"]
        assert stats["submitted_total"] == 1000
        ended = sum(v for k, v in stats.items() if k.startswith("finished_"))
        assert ended == 1000
        assert stats["finished_abort_total"] > 100
        assert stats["illegal_moves_total"] == 0
        assert (await engine.client.flush())[0]
        assert pool_units(await engine.idle_state())["free"] == 128


async def test_shutdown_lets_running_requests_end_within_the_grace_period():
    async with running_engine(fake={"base_us": 1000}) as engine:
        stream = engine.submit([5] * 20, 50)
        await anext(stream)
        engine.client.shutdown(grace_s=30.0)
        late = engine.submit([5] * 20, 50)
        with pytest.raises(NotReady):
            await late.accepted()
        assert (await read(stream))[1] is FinishCode.LENGTH
        async with asyncio.timeout(20):
            assert await engine.supervisor.wait() == 0


async def test_ready_tells_sizes_pools_and_versions():
    async with running_engine() as engine:
        info = engine.client.info
    assert (info["page_size"], info["num_pages"], info["max_total_num_tokens"]) == (16, 256, 4096)
    assert info["kv_bytes_per_token"] > 0
    assert {pool["name"] for pool in info["pool_table"]} >= {"full", "req_slots"}
    assert info["versions"]["protocol"] == wire.PROTOCOL_VERSION
    assert info["config"]["max_running_requests"] == 32


async def test_fake_window_replaces_the_model_window():
    async with running_engine(fake={"window": 32}) as engine:
        assert engine.client.info["sliding_window"] == 32
        jobs = list(prompts(30, seed=4))
        results = await asyncio.gather(*(engine.generate(p, 20) for p in jobs))
        assert [ids for ids, _ in results] == [fake_output(p, 20) for p in jobs]


async def test_whole_extend_and_disabled_replays_pass_the_slot_check():
    jobs = list(prompts(30, seed=5))
    for flags in (
        {},
        {"enable_decoder_swa_bounded_replay": False},
        {"enable_encoder_swa_bounded_replay": False},
        {"disable_radix_cache": True},
        {"enable_mixed_chunk": True, "prefill_decode_interval": 2, "schedule_policy": "lpm"},
    ):
        fields = {"whole_extend": True} if not flags else {}
        results, state = await run_jobs(
            [(p, 20, fields) for p in jobs], chunked_prefill_size=64, **flags
        )
        assert [ids for ids, _ in results] == [fake_output(p, 20) for p in jobs], flags
        assert_idle(state)


async def test_a_request_that_wants_rows_of_its_prompt_limits_its_hit():
    prompt = list(range(5, 205))
    async with running_engine() as engine:
        await engine.generate(prompt, 1)
        for limit, expected in ((None, 192), (100, 96), (10, 0)):
            fields = {"whole_extend": True, "max_cached_len": limit}
            deltas = [delta async for delta in engine.submit(prompt, 1, **fields)]
            assert deltas[-1].cached_len == expected, limit
        assert_idle(await engine.idle_state())


async def test_errors_of_the_tree_are_what_a_lost_engine_raises():
    async with running_engine() as engine:
        await engine.client.close()
        with pytest.raises(DsserveError):
            engine.submit([5])
        # The client is closed, so nobody can ask for a shutdown; the supervisor kills.
        await engine.supervisor.stop(timeout_s=0.0)
        assert engine.supervisor.returncode == -9
        assert engine.exit_codes == []
