"""Clients that leave, stall or are aborted: their requests end, once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api_server import num_held

if TYPE_CHECKING:
    from api_server import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 4000, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [10, 11, 12]},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
}


def aborted_total(server: ServerProcess) -> float:
    return sum(
        float(value)
        for value in re.findall(
            r'^dsserve_num_aborted_requests_total\{.*reason="client".*\} (\S+)$',
            server.get("/metrics").text,
            re.MULTILINE,
        )
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("count", [1, 3])
def test_leaving_a_stream_frees_its_requests(
    idle_server: ServerProcess, path: str, count: int
) -> None:
    before = aborted_total(idle_server)
    body = BODIES[path] | LONG | {"stream": True, "n": count}
    with httpx.stream("POST", idle_server.url + path, json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept: a dropped iterator closes the connection
        next(lines)
        idle_server.wait_running(count)
    idle_server.wait_idle()
    assert aborted_total(idle_server) == before + count


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_leaving_while_waiting_for_a_whole_answer_frees_it(
    idle_server: ServerProcess, path: str
) -> None:
    before = aborted_total(idle_server)
    connection = _send_request(idle_server, path, BODIES[path] | LONG)
    idle_server.wait_running()
    connection.close()
    idle_server.wait_idle()
    assert aborted_total(idle_server) == before + 1


def test_a_stream_that_ended_sends_no_abort(idle_server: ServerProcess) -> None:
    before = idle_server.state()["stats"]["finished_abort_total"]
    for path, body in BODIES.items():
        for stream in (False, True):
            response = idle_server.post(path, body | {"max_tokens": 8, "stream": stream})
            assert response.status_code == 200
            stopped = body | {"max_tokens": 64, "stream": stream, "stop": ["e", "a", "o", "!"]}
            assert idle_server.post(path, stopped).status_code == 200
    assert idle_server.wait_idle()["stats"]["finished_abort_total"] == before


def test_half_a_body_then_gone_leaves_nothing(idle_server: ServerProcess) -> None:
    with _connect(idle_server) as connection:
        connection.sendall(_head(COMPLETIONS, 1000) + b'{"prompt": "x')
    idle_server.wait_idle()


def test_abort_request_ends_by_id_and_by_prefix(idle_server: ServerProcess) -> None:
    body = BODIES[COMPLETIONS] | LONG | {"stream": True}
    for asked in ("job-7", "job"):
        with httpx.stream(
            "POST", idle_server.url + COMPLETIONS, json=body | {"rid": "job-7"}, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            answer = idle_server.post("/abort_request", {"rid": asked}).json()
            assert answer["num_aborted"] == 1
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        last = json.loads(events[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "abort"
    assert idle_server.post("/abort_request", {"rid": "job-7"}).json()["num_aborted"] == 0


def test_abort_all_ends_everything(idle_server: ServerProcess) -> None:
    connections = [
        _send_request(idle_server, path, body | LONG | {"n": 2}) for path, body in BODIES.items()
    ]
    idle_server.wait_running(4)
    assert idle_server.post("/abort_request", {"abort_all": True}).json()["num_aborted"] == 4
    for connection in connections:
        with connection, connection.makefile("rb") as answer:
            assert b"200" in answer.readline()
    idle_server.wait_idle()


def test_a_client_that_does_not_read_holds_up_nobody(idle_server: ServerProcess) -> None:
    body = BODIES[COMPLETIONS] | {"stream": True, "max_tokens": 4000, "n": 4}
    stalled = _send_request(idle_server, COMPLETIONS, body)
    with stalled:
        idle_server.wait_running()
        other = idle_server.post(COMPLETIONS, BODIES[COMPLETIONS] | {"max_tokens": 16})
        assert other.status_code == 200
    idle_server.wait_idle()


async def test_1000_random_requests_with_random_disconnects_leak_nothing(
    server: ServerProcess,
) -> None:
    rng = random.Random(20261129)
    slots = asyncio.Semaphore(48)
    outcomes: dict[str, int] = {}
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

        async def one(plan: dict[str, Any]) -> None:
            async with slots:
                outcome = await _run_plan(client, plan)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

        await asyncio.gather(*(one(_random_plan(rng)) for _ in range(1000)))
    assert sum(outcomes.values()) == 1000
    assert outcomes["ended"] > 100
    assert outcomes["left"] > 100
    state = server.wait_idle()
    assert num_held(state) == 0
    response = server.post("/flush_cache")
    assert response.status_code == 200, response.text
    for pool in server.state()["pools"]:
        assert pool["free"] == pool["capacity"], "after a flush every unit is free"


def _random_plan(rng: random.Random) -> dict[str, Any]:
    path = rng.choice([COMPLETIONS, CHAT])
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 4, 16, 64]),
        "stream": rng.random() < 0.6,
        "n": rng.choice([1, 1, 1, 2]),
    }
    length = rng.choice([1, 30, 200, 700])
    shared = rng.randrange(4)
    if path == COMPLETIONS:
        own = [rng.randrange(3, 90) for _ in range(length // 4)]
        body["prompt"] = [(shared + index) % 80 + 3 for index in range(length)] + own
    else:
        body["messages"] = [{"role": "user", "content": f"{shared} " * (length // 4)}]
    if rng.random() < 0.3:
        body["stop"] = [rng.choice("abcdef!?")]
    return {
        "path": path,
        "body": body,
        # After how many lines, or how many seconds, the client leaves.
        "lines": rng.choice([None, None, 0, 1, 5]),
        "patience_s": rng.choice([None, None, 0.001, 0.02]),
        "is_wrong": rng.random() < 0.05,
    }


async def _run_plan(client: httpx.AsyncClient, plan: dict[str, Any]) -> str:
    body = plan["body"]
    if plan["is_wrong"]:
        response = await client.post(plan["path"], json=body | {"max_tokens": -1})
        assert response.status_code == 400
        return "refused"
    if not body["stream"]:
        try:
            async with asyncio.timeout(plan["patience_s"]):
                response = await client.post(plan["path"], json=body)
        except TimeoutError:
            return "left"
        assert response.status_code == 200, response.text
        return "ended"
    async with client.stream("POST", plan["path"], json=body) as response:
        assert response.status_code == 200
        seen = 0
        last = ""
        async for line in response.aiter_lines():
            if plan["lines"] is not None and seen >= plan["lines"]:
                return "left"
            seen += 1
            last = line or last
    assert last == "data: [DONE]"
    return "ended"


def _connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def _head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def _send_request(server: ServerProcess, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a whole request and read nothing."""
    data = json.dumps(body).encode()
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(_connect(server))
        connection.sendall(_head(path, len(data)) + data)
        stack.pop_all()
    return connection
