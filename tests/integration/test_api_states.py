"""What the application says before the engine is ready, when it is stuck, and when it is gone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from dsserve.config.model import load_model_config
from dsserve.config.resolve import resolve
from dsserve.config.server import ServerConfig
from dsserve.entrypoints.app import create_app
from dsserve.entrypoints.state import ServerState, build_state, load_sampling_defaults
from dsserve.errors import ConfigError, EngineLost, InvalidRequest
from dsserve.frontend.client import EngineClient
from dsserve.frontend.detokenize import TextCodec, TextOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

COMPLETIONS = "/v1/completions"
PROBES = ("/health", "/ready", "/health_generate")


class SeemingClient(EngineClient):
    """A client without an engine that claims what the test wants."""

    seems_ready = False
    age_s = 0.0

    @property
    def is_ready(self) -> bool:
        return self.seems_ready and self.failure is None

    @property
    def heartbeat_age_s(self) -> float:
        return self.age_s


@pytest.fixture
def state(model_path: Path, tmp_path: Path) -> ServerState:
    model = load_model_config(str(model_path), {})
    config = resolve(ServerConfig(model_path=str(model_path), load_format="fake"), model)
    return build_state(config, model, SeemingClient(tmp_path))


@pytest.fixture
async def client(state: ServerState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def statuses(client: httpx.AsyncClient) -> list[int]:
    return [(await client.get(path)).status_code for path in PROBES]


async def check_refused(client: httpx.AsyncClient, code: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": [5]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    }
    for path, body in bodies.items():
        for stream in (False, True):
            response = await client.post(path, json=body | {"stream": stream})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == code
            assert "retry-after" in response.headers


async def test_while_loading_the_server_lives_but_is_not_ready(client: httpx.AsyncClient) -> None:
    assert await statuses(client) == [200, 503, 503]
    assert (await client.get("/health")).json() == {"status": "loading"}
    await check_refused(client, "not_ready")
    info = (await client.get("/get_server_info")).json()
    assert (info["status"], info["engine"], info["state"]) == ("loading", None, None)
    assert (await client.get("/metrics")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 200
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert (await client.post("/flush_cache")).status_code == 503


async def test_until_the_first_request_is_answered_it_is_not_ready(
    client: httpx.AsyncClient, state: ServerState
) -> None:
    assert isinstance(state.client, SeemingClient)
    state.client.seems_ready = True
    assert (await client.get("/ready")).status_code == 503
    state.is_warm = True
    assert (await client.get("/ready")).status_code == 200


async def test_draining_server_lives_but_is_not_ready(
    client: httpx.AsyncClient, state: ServerState
) -> None:
    assert isinstance(state.client, SeemingClient)
    state.client.seems_ready = state.is_warm = state.is_draining = True
    assert (await client.get("/health")).json() == {"status": "draining"}
    assert (await client.get("/ready")).status_code == 503
    await check_refused(client, "shutting_down")


async def test_engine_without_heartbeat_is_not_healthy(
    client: httpx.AsyncClient, state: ServerState
) -> None:
    assert isinstance(state.client, SeemingClient)
    state.client.seems_ready = state.is_warm = True
    state.client.age_s = 9.0
    assert (await client.get("/health")).status_code == 200
    state.client.age_s = 11.0
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unresponsive"


async def test_lost_engine_fails_every_probe_at_once(
    client: httpx.AsyncClient, state: ServerState
) -> None:
    state.client.fail_all(EngineLost("the engine process ended with code -9"))
    assert await statuses(client) == [503, 503, 503]
    await check_refused(client, "engine_lost")
    assert (await client.get("/metrics")).status_code == 200


def test_sampling_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": null, "eos_token_id": 1}')
    assert load_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95}
    file.write_text('{"do_sample": false, "temperature": 0.6}')
    assert load_sampling_defaults(tmp_path) == {"temperature": 0.0}
    for wrong in ('{"top_p": "high"}', '{"top_k": true}', "[]", "{"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            load_sampling_defaults(tmp_path)


async def test_long_text_work_leaves_the_event_loop(
    client: httpx.AsyncClient, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(state.client, SeemingClient)
    state.client.seems_ready = state.is_warm = True
    threads: list[int] = []

    def noted(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    noted(TextCodec, "decode_each")
    noted(TextOptions, "compile")
    body = {"prompt": "a b " * 4000, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert "".join(answer["token_strs"]) == body["prompt"]
    assert len(threads) == 1  # one call for all ids
    for stops in ({"stop": [str(index) + "x" * 500 for index in range(8)]}, {"stop_regex": "a"}):
        # Without an engine the request is refused, after its stops were compiled once for all choices.
        body = {"prompt": ["a"] * 3, "n": 4} | stops
        assert (await client.post(COMPLETIONS, json=body)).status_code == 503
    assert len(threads) == 3
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(("num_words", "is_inline"), [(1, True), (200_000, False)])
async def test_large_tools_are_encoded_beside_the_event_loop(
    client: httpx.AsyncClient,
    state: ServerState,
    monkeypatch: pytest.MonkeyPatch,
    num_words: int,
    is_inline: bool,
) -> None:
    assert isinstance(state.client, SeemingClient)
    state.client.seems_ready = state.is_warm = True
    threads = []

    def convert(*_: Any) -> None:
        threads.append(threading.current_thread())
        raise InvalidRequest("seen")

    monkeypatch.setattr(type(state.converter), "convert", convert)
    function = {"name": "f", "description": "hello world " * num_words}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function}],
    }
    response = await client.post("/v1/chat/completions", json=body)
    assert response.json()["error"]["message"] == "seen"
    assert [thread is threading.current_thread() for thread in threads] == [is_inline]
