"""What happens to requests, processes and sockets when a process dies or talks nonsense."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsserve.engine.supervisor import EngineSupervisor
from dsserve.errors import EngineFault, EngineLost
from dsserve.protocol import engine as wire
from dsserve.protocol.engine import ExitCode, FinishCode
from dsserve.worker.fake_model import fake_output
from engine_process import assert_idle, read, running_engine, server_config

LIMIT_S = 30


async def wait_exit(engine):
    async with asyncio.timeout(LIMIT_S):
        return await engine.supervisor.wait()


async def start_streams(engine, count):
    streams = [engine.submit([5 + i] * 20, 400) for i in range(count)]
    for stream in streams:
        await anext(stream)
    return streams


async def test_kill_of_the_engine_fails_every_open_stream_and_query_at_once():
    async with running_engine(fake={"base_us": 2000}, max_total_tokens=16384) as engine:
        streams = await start_streams(engine, 20)
        waiting = [asyncio.create_task(read(stream)) for stream in streams]
        os.kill(engine.supervisor.process_id, signal.SIGSTOP)
        query = asyncio.create_task(engine.client.query_state())
        os.kill(engine.supervisor.process_id, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            results = await asyncio.gather(*waiting, query, return_exceptions=True)
        assert all(isinstance(result, EngineFault) for result in results)
        assert {result.status for result in results} == {503}
        assert engine.exit_codes == [-signal.SIGKILL]
        assert engine.supervisor.returncode == -signal.SIGKILL
        assert not engine.client.is_alive
        with pytest.raises(EngineLost):
            engine.submit([5])
        with pytest.raises(EngineLost):
            await engine.client.flush()


async def test_fault_of_the_worker_is_told_and_ends_the_process():
    async with running_engine(fake={"base_us": 1000}) as engine:
        streams = await start_streams(engine, 3)
        bad = engine.submit([7] * 20, 30, custom_params={"script": {"fault_at": 5}})
        for stream in [*streams, bad]:
            with pytest.raises(EngineLost, match=r"DeviceFault: step \d+"):
                await read(stream)
        assert await wait_exit(engine) == ExitCode.FAULT
        assert engine.exit_codes == [ExitCode.FAULT]


async def test_step_beyond_the_watchdog_timeout_ends_the_process_with_a_dump(capfd):
    async with running_engine(watchdog_timeout=1.0) as engine:
        script = {"delays_us": [0, 3_600_000_000]}
        stream = engine.submit([7] * 20, 30, custom_params={"script": script})
        with pytest.raises(EngineLost):
            await read(stream)
        assert await wait_exit(engine) == ExitCode.WATCHDOG
    log = capfd.readouterr().err
    assert "a step has been running for" in log
    assert "num_live_requests" in log
    assert "fake worker stream" in log or "_finish_oldest" in log


async def test_long_step_counts_as_alive_and_says_its_age():
    async with running_engine() as engine:
        script = {"delays_us": [1_200_000]}
        stream = engine.submit([7] * 20, 2, custom_params={"script": script})
        ages = []
        reading = asyncio.create_task(read(stream))
        while not reading.done():
            await asyncio.wait({reading}, timeout=0.05)
            assert engine.client.is_alive
            ages.append(engine.client.last_heartbeat.step_age_s)
        assert (await reading)[1] is FinishCode.LENGTH
        assert max(ages) > 0.5


async def test_sigterm_and_sigint_are_left_to_the_api_process():
    async with running_engine(fake={"base_us": 1000}) as engine:
        [stream] = await start_streams(engine, 1)
        os.kill(engine.supervisor.process_id, signal.SIGTERM)
        os.kill(engine.supervisor.process_id, signal.SIGINT)
        assert (await read(stream))[1] is FinishCode.LENGTH
        assert_idle(await engine.idle_state())


async def test_malformed_messages_are_logged_and_harm_nothing(capfd):
    async with running_engine() as engine:
        hello = wire.encode(wire.Hello())
        engine.send_raw(b"", b"\xc1\xff", hello[:-1], b'{"type": "submit"}', os.urandom(1000))
        ids, code = await engine.generate([5] * 20, 10)
        assert (ids, code) == (fake_output([5] * 20, 10), FinishCode.LENGTH)
        await engine.idle_state()
    assert capfd.readouterr().err.count("dropped a malformed message") == 5


async def test_hello_of_another_version_ends_the_engine():
    async with running_engine() as engine:
        engine.send_raw(wire.encode(wire.Hello(protocol_version=wire.PROTOCOL_VERSION + 1)))
        assert await wait_exit(engine) == ExitCode.PROTOCOL
        assert engine.client.failure is not None


async def test_configuration_of_another_version_is_refused(capfd):
    supervisor = EngineSupervisor(server_config(), protocol_version=wire.PROTOCOL_VERSION + 1)
    await supervisor.start()
    async with asyncio.timeout(LIMIT_S):
        assert await supervisor.wait() == ExitCode.PROTOCOL
    await supervisor.stop(timeout_s=0.0)
    assert "protocol version" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"max_total_tokens": 8}, "max-total-tokens"),
        ({"chunked_prefill_size": 16}, "chunked-prefill-size"),
        ({"fake": {"draft_accept": 1}}, "draft_accept"),
        ({"model_path": "/nonexistent"}, "config.json"),
    ],
)
async def test_wrong_configuration_is_told_before_the_process_ends(flags, match):
    async with running_engine(wait_ready=False, **flags) as engine:
        with pytest.raises(EngineLost, match=match):
            await engine.client.wait_ready()
        assert await wait_exit(engine) == ExitCode.CONFIG


PARENT = """
import asyncio, sys
from engine_process import running_engine

async def main():
    async with running_engine(fake={"base_us": 1000}) as engine:
        await anext(engine.submit([5] * 20, 400))
        print(engine.supervisor.process_id, engine.supervisor.ipc_dir, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_death_of_the_api_process_ends_the_engine_and_removes_its_sockets():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    ) as parent:
        engine_pid, ipc_dir = parent.stdout.readline().split()
        handle = os.pidfd_open(int(engine_pid))
        try:
            parent.kill()
            assert select.select([handle], [], [], LIMIT_S)[0], "the engine outlived its parent"
        finally:
            os.close(handle)
    assert not Path(ipc_dir).exists()


async def test_keys_of_users_do_not_reach_the_engine():
    supervisor = EngineSupervisor(server_config(api_key=("k-1",), admin_api_key="k-2"))
    try:
        await supervisor.start()
        text = (supervisor.ipc_dir / "engine.json").read_text()
        assert "k-1" not in text
        assert "k-2" not in text
        assert supervisor.ipc_dir.stat().st_mode & 0o777 == 0o700
    finally:
        await supervisor.stop(timeout_s=0.0)
    assert not supervisor.ipc_dir.exists()


async def test_stop_before_start_removes_the_directory():
    supervisor = EngineSupervisor(server_config())
    await supervisor.stop(timeout_s=0.0)
    await supervisor.stop(timeout_s=0.0)
    assert not supervisor.ipc_dir.exists()


async def test_directory_has_a_path_short_enough_for_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    supervisor = EngineSupervisor(server_config())
    assert len(str(supervisor.ipc_dir / wire.FROM_ENGINE_SOCKET)) <= 107
    await supervisor.stop(timeout_s=0.0)
    assert list(long.iterdir()) == []
