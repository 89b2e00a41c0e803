"""The client alone, against a socket that plays the engine."""

import asyncio
import logging
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq.asyncio

from dsserve.errors import EngineFault, EngineLost, NotReady
from dsserve.frontend.client import EngineClient
from dsserve.protocol import engine as wire
from dsserve.protocol.engine import FinishCode


class PlayedEngine:
    def __init__(self, client, receiver, sender):
        self.client = client
        self.receiver = receiver
        self.sender = sender

    async def receive(self):
        async with asyncio.timeout(10):
            return wire.decode_to_engine(await self.receiver.recv())

    async def send(self, *messages):
        for message in messages:
            frame = message if isinstance(message, bytes) else wire.encode(message)
            await self.sender.send(frame)

    def submit(self, request_id=1):
        return self.client.submit(
            wire.EngineRequest(request_id=request_id, token_ids=b"", max_new_tokens=1)
        )


def outputs(request_id, ids, code=FinishCode.NONE, output_len=0):
    return wire.Outputs(
        step_id=1,
        request_ids=wire.pack_u64([request_id]),
        token_offsets=wire.pack_u32([0, len(ids)]),
        token_ids=wire.pack_u32(ids),
        finish_codes=bytes([code]),
        prompt_lens=wire.pack_u32([9]),
        cached_lens=wire.pack_u32([4]),
        output_lens=wire.pack_u32([output_len]),
    )


@asynccontextmanager
async def played_engine(tmp_path, **options):
    client = EngineClient(tmp_path, **options)
    with (
        zmq.asyncio.Context() as context,
        context.socket(zmq.PULL) as receiver,
        context.socket(zmq.PUSH) as sender,
    ):
        receiver.bind(f"ipc://{tmp_path / wire.TO_ENGINE_SOCKET}")
        await client.start()
        sender.connect(f"ipc://{tmp_path / wire.FROM_ENGINE_SOCKET}")
        engine = PlayedEngine(client, receiver, sender)
        assert isinstance(await engine.receive(), wire.Hello)
        try:
            yield engine
        finally:
            await client.close()


@asynccontextmanager
async def ready_engine(tmp_path):
    async with played_engine(tmp_path) as engine:
        await engine.send(wire.Hello(), wire.Ready(info={"page_size": 16}))
        await engine.client.wait_ready()
        yield engine


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def test_progress_and_readiness_are_told(tmp_path):
    seen = []
    async with played_engine(tmp_path, on_progress=seen.append) as engine:
        with pytest.raises(NotReady):
            _ = engine.client.info
        progress = wire.LoadProgress(stage="read", done=1, total=2)
        await engine.send(progress, wire.Ready(info={"a": 1}))
        assert await engine.client.wait_ready() == {"a": 1}
        assert seen == [progress]


async def test_a_ready_engine_counts_as_alive_before_its_first_heartbeat(tmp_path):
    async with played_engine(tmp_path) as engine:
        await engine.send(wire.Hello(), wire.Ready(info={}))
        await engine.client.wait_ready()
        assert engine.client.silence_s < 60
        assert engine.client.heartbeat_age_s == float("inf")


async def test_requests_of_one_turn_travel_in_one_message_before_their_aborts(tmp_path):
    async with ready_engine(tmp_path) as engine:
        engine.submit(1)
        engine.submit(2)
        engine.client.abort(1)
        engine.submit(3)
        first, abort, second = [await engine.receive() for _ in range(3)]
        assert [r.request_id for r in first.requests] == [1, 2]
        assert wire.unpack_u64(abort.request_ids) == [1]
        assert [r.request_id for r in second.requests] == [3]


async def test_deltas_that_nobody_reads_are_merged(tmp_path):
    async with ready_engine(tmp_path) as engine:
        stream = engine.submit()
        await engine.send(outputs(1, [5], output_len=1), outputs(1, [6, 7], output_len=3))
        await engine.send(outputs(1, [8], FinishCode.LENGTH, output_len=4))
        await until(lambda: not stream.is_open)
        deltas = [delta async for delta in stream]
        assert [delta.token_ids for delta in deltas] == [[5, 6, 7, 8]]
        assert (deltas[0].finish_code, deltas[0].output_len) == (FinishCode.LENGTH, 4)
        assert (deltas[0].prompt_len, deltas[0].cached_len) == (9, 4)


async def test_acceptance_is_known_before_the_first_token(tmp_path):
    async with ready_engine(tmp_path) as engine:
        stream = engine.submit()
        accepted = asyncio.create_task(stream.accepted())
        await engine.receive()
        assert not accepted.done()
        await engine.send(wire.Accepted(request_ids=wire.pack_u64([1])))
        await accepted


async def test_leaving_a_stream_early_aborts_it_once(tmp_path):
    async with ready_engine(tmp_path) as engine:
        async with engine.submit() as stream:
            pass
        stream.close()
        engine.client.abort(1)
        engine.client.shutdown(0.0)
        kinds = [type(await engine.receive()) for _ in range(3)]
        assert kinds == [wire.SubmitBatch, wire.Abort, wire.Shutdown]
        assert engine.client.num_open_requests == 0


async def test_stream_that_ended_sends_no_abort(tmp_path):
    async with ready_engine(tmp_path) as engine:
        async with engine.submit() as stream:
            await engine.send(outputs(1, [5], FinishCode.LENGTH, output_len=1))
            assert [delta.token_ids async for delta in stream] == [[5]]
        engine.client.abort(1)
        engine.client.finish(1, 0)
        engine.client.shutdown(0.0)
        kinds = [type(await engine.receive()) for _ in range(2)]
        assert kinds == [wire.SubmitBatch, wire.Shutdown]


async def test_outputs_of_abandoned_requests_are_dropped(tmp_path):
    async with ready_engine(tmp_path) as engine:
        engine.submit(1).close()
        other = engine.submit(2)
        await engine.send(outputs(1, [5]), outputs(2, [6], FinishCode.LENGTH))
        assert [delta.token_ids async for delta in other] == [[6]]


async def test_id_in_use_is_refused(tmp_path):
    async with ready_engine(tmp_path) as engine:
        engine.submit(1)
        with pytest.raises(ValueError, match="in use"):
            engine.submit(1)


async def test_malformed_message_of_the_engine_is_logged_and_dropped(tmp_path, caplog):
    async with ready_engine(tmp_path) as engine:
        stream = engine.submit()
        with caplog.at_level(logging.ERROR):
            await engine.send(b"\xc1", outputs(1, [5], FinishCode.LENGTH))
            assert [delta.token_ids async for delta in stream] == [[5]]
        assert "malformed" in caplog.text


async def test_outputs_that_contradict_themselves_fail_the_connection(tmp_path, caplog):
    async with ready_engine(tmp_path) as engine:
        stream = engine.submit()
        await engine.send(msgspec.structs.replace(outputs(1, [5]), prompt_lens=b"\x01"))
        with pytest.raises(EngineFault, match="connection to the engine failed"):
            await anext(stream)
        assert not engine.client.is_ready


async def test_engine_of_another_version_is_refused(tmp_path):
    async with played_engine(tmp_path) as engine:
        await engine.send(wire.Hello(protocol_version=99))
        with pytest.raises(EngineFault, match="version 99"):
            await engine.client.wait_ready()


async def test_what_was_pending_is_read_before_the_loss_is_raised(tmp_path):
    async with ready_engine(tmp_path) as engine:
        stream = engine.submit()
        await engine.send(outputs(1, [5], output_len=1), wire.Fatal(message="no memory"))
        await until(lambda: engine.client.failure is not None)
        assert (await anext(stream)).token_ids == [5]
        with pytest.raises(EngineLost, match="no memory"):
            await anext(stream)


async def test_query_without_answer_ends_after_its_timeout(tmp_path):
    async with ready_engine(tmp_path) as engine:
        with pytest.raises(EngineFault, match="did not answer"):
            await engine.client.query_state(timeout_s=0.0)
        query = asyncio.create_task(engine.client.flush())
        await engine.receive()
        message = await engine.receive()
        assert isinstance(message, wire.FlushCache)
        reply = wire.Reply(query_id=message.query_id, ok=False, payload={"holders": [4]})
        await engine.send(reply)
        assert await query == (False, [4])


async def test_close_fails_what_is_open(tmp_path):
    async with ready_engine(tmp_path) as engine:
        stream = engine.submit()
        await engine.client.close()
        with pytest.raises(EngineLost):
            await anext(stream)
        with pytest.raises(EngineLost):
            await stream.accepted()


async def test_liveness_is_the_age_of_the_last_heartbeat(tmp_path):
    async with ready_engine(tmp_path) as engine:
        assert not engine.client.is_alive
        assert engine.client.stats == {}
        await engine.send(wire.Heartbeat(time_s=1.0, step_age_s=2.0, stats={"num_running_reqs": 3}))
        await until(lambda: engine.client.is_alive)
        assert engine.client.stats == {"num_running_reqs": 3}
        assert engine.client.last_heartbeat.step_age_s == 2.0
        engine.client._beat_time_s -= 11
        assert not engine.client.is_alive
