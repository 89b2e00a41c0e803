"""A real engine process of the fake model, with its supervisor and client, for tests."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from dsserve.config.server import ServerConfig
from dsserve.engine.supervisor import EngineSupervisor
from dsserve.errors import EngineLost
from dsserve.frontend.client import EngineClient, RequestStream
from dsserve.protocol import engine as wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

MODEL_PATH = Path(__file__).parent / "golden" / "data" / "v41-tiny-a"
"""Window 16, 512 positions, 512 ids, end of sequence 1."""

START_TIMEOUT_S = 60.0
EOS = 1


def server_config(*, fake: dict[str, Any] | None = None, **flags: Any) -> ServerConfig:
    return ServerConfig(
        **{
            "model_path": str(MODEL_PATH),
            "load_format": "fake",
            "page_size": 16,
            "max_total_tokens": 4096,
            "max_running_requests": 32,
            "json_model_override_args": {"fake": fake or {}},
            **flags,
        }
    )


@dataclass
class Engine:
    supervisor: EngineSupervisor
    client: EngineClient
    exit_codes: list[int] = field(default_factory=list)

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int = 16, **fields: Any
    ) -> RequestStream:
        return self.client.submit(
            wire.EngineRequest(
                request_id=self.client.next_request_id(),
                token_ids=wire.pack_u32(prompt),
                max_new_tokens=max_new_tokens,
                arrival_s=time.monotonic(),
                **fields,
            )
        )

    async def generate(
        self, prompt: Sequence[int], max_new_tokens: int = 16, **fields: Any
    ) -> tuple[list[int], wire.FinishCode]:
        return await read(self.submit(prompt, max_new_tokens, **fields))

    def send_raw(self, *frames: bytes) -> None:
        """Push frames from a socket of our own."""
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(f"ipc://{self.supervisor.ipc_dir / wire.TO_ENGINE_SOCKET}")
            for frame in frames:
                socket.send(frame)

    async def idle_state(self) -> dict[str, Any]:
        """Wait, for a bounded time, until nothing is held; the state has passed its check."""
        async with asyncio.timeout(30):
            while True:
                state = await self.client.query_state()
                if not state["num_live_requests"] and not state["steps_in_flight"]:
                    return state


async def read(stream: RequestStream) -> tuple[list[int], wire.FinishCode]:
    ids: list[int] = []
    async for delta in stream:
        ids += delta.token_ids
        if delta.finish_code is not wire.FinishCode.NONE:
            return ids, delta.finish_code
    raise AssertionError("the stream ended without a finish code")


@asynccontextmanager
async def running_engine(
    *, fake: dict[str, Any] | None = None, wait_ready: bool = True, **flags: Any
) -> AsyncIterator[Engine]:
    """Start an engine, and end it whatever happens."""

    def on_exit(code: int) -> None:
        engine.exit_codes.append(code)
        engine.client.fail_all(EngineLost(f"the engine process ended with code {code}"))

    supervisor = EngineSupervisor(server_config(fake=fake, **flags), on_exit=on_exit)
    engine = Engine(supervisor, EngineClient(supervisor.ipc_dir))
    try:
        await engine.client.start()
        await supervisor.start()
        if wait_ready:
            async with asyncio.timeout(START_TIMEOUT_S):
                await engine.client.wait_ready()
        yield engine
    finally:
        engine.client.shutdown(grace_s=0.0)
        await supervisor.stop(timeout_s=20.0)
        await engine.client.close()
        assert not supervisor.ipc_dir.exists()


def pool_units(state: dict[str, Any], name: str = "full") -> dict[str, Any]:
    pool: dict[str, Any]
    [pool] = [pool for pool in state["pools"] if pool["name"] == name]
    return pool


def assert_idle(state: dict[str, Any]) -> None:
    """Nothing is held but what the prefix cache keeps for later requests."""
    for pool in state["pools"]:
        held = {key: pool[key] for key in ("locked", "private", "quarantined")}
        assert not any(held.values()), pool
        assert pool["free"] + pool["evictable"] == pool["capacity"], pool
    assert state["stats"]["num_running"] == state["stats"]["num_waiting"] == 0
