"""What broke once under hostile clients: each input keeps its test. Raw bytes where a client library is too polite."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api_errors import check_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from api_server import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODY = b'{"prompt": "x", "max_tokens": 2}'


def exchange(server: ServerProcess, *parts: bytes) -> bytes:
    """Send bytes on a connection of their own; return the first response, or what came of it."""
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all was sent
        data = b""
        while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < length_of(data):
            more = connection.recv(65536)
            if not more:
                break
            data += more
        return data


def length_of(response: bytes) -> int:
    for line in response.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def error_of(response: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    return error


def head(*lines: bytes) -> bytes:
    return b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"Host: x", *lines, b"", b""])


UPGRADE = (b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAA")
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "parts",
    [
        (head(*UPGRADE, LENGTH) + BODY,),
        (head(*UPGRADE, LENGTH), BODY[:5], BODY[5:]),
        (head(*UPGRADE, b"Transfer-Encoding: chunked") + CHUNKED,),
    ],
)
def test_body_of_a_request_that_offers_an_upgrade_is_read(
    idle_server: ServerProcess, parts: tuple[bytes, ...]
) -> None:
    assert status_of(exchange(idle_server, *parts)) == 200


def test_requests_after_one_that_offers_an_upgrade_are_answered(idle_server: ServerProcess) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    port = int(idle_server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(get + head(*UPGRADE, LENGTH) + BODY + get)
        data = b""
        while data.count(b"HTTP/1.1 200 OK") < 3:
            more = connection.recv(65536)
            assert more, data
            data += more


@pytest.mark.parametrize(
    "request_head",
    [
        head(b"X-A: " + b"a" * 10_000_000, LENGTH),
        head(*(b"X-%d: a" % i for i in range(20_000)), LENGTH),
    ],
    ids=["one header", "many headers"],
)
def test_huge_head_is_refused(idle_server: ServerProcess, request_head: bytes) -> None:
    response = exchange(idle_server, request_head, BODY)
    assert status_of(response) == 431
    assert "65536" in error_of(response)["message"]


def test_head_below_the_limit_passes(idle_server: ServerProcess) -> None:
    response = exchange(idle_server, head(b"X-A: " + b"a" * 60_000, LENGTH) + BODY)
    assert status_of(response) == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n",
        head(b"Content-Length: abc"),
        head(b"Content-Length: 5", b"Content-Length: 6"),
        head(b"Transfer-Encoding: chunked") + b"zz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT evil:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_body_too(idle_server: ServerProcess, data: bytes) -> None:
    response = exchange(idle_server, data)
    assert 400 <= status_of(response) < 500
    assert error_of(response)["message"]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [130, 900, 1010])
@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "x", "extra": %s}]}',
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"messages": [{"role": "user", "content": "x"}], "thinking": {"type": %s}}',
        '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
        '"function": {"name": "f", "parameters": {"a": %s}}}]}',
    ],
)
def test_deeply_nested_body_is_a_400(idle_server: ServerProcess, body: str, depth: int) -> None:
    check_error(idle_server.post(CHAT, content=body % nested(depth)), 400)


def test_bias_key_of_thousands_of_digits_is_a_400(idle_server: ServerProcess) -> None:
    body = {"prompt": "x", "logit_bias": {"1" * 5000: 1}}
    check_error(idle_server.post(COMPLETIONS, body), 400, param="logit_bias")


def test_messages_quote_only_the_beginning_of_a_long_value(idle_server: ServerProcess) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        response = idle_server.post(path, {**fields, "model": "m" * 100_000})
        assert len(check_error(response, 404)["message"]) < 300


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages[1].role", {"messages": [*MESSAGES, {"role": "king", "content": "x"}]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{}]}]}),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        ),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
        (
            "messages[0].tool_calls[0].function.arguments",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": "f", "arguments": {}},
                            }
                        ],
                    }
                ]
            },
        ),
        ("messages[0].prefix", {"messages": [{"role": "user", "content": "x", "prefix": True}]}),
        ("tools[0].type", {"tools": [{}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
        ("thinking", {"thinking": {}}),
        ("reasoning_effort", {"reasoning_effort": "bogus"}),
        ("max_tokens", {"max_tokens": 10**12}),
        ("max_completion_tokens", {"max_completion_tokens": 10**12}),
    ],
)
def test_wrong_chat_field_is_named(
    idle_server: ServerProcess, param: str, fields: dict[str, Any]
) -> None:
    error = check_error(idle_server.post(CHAT, {"messages": MESSAGES, **fields}), 400, param=param)
    assert "variant" not in error["message"]


def test_wrong_values_are_quoted(idle_server: ServerProcess) -> None:
    error = check_error(idle_server.post(COMPLETIONS, {"prompt": "x", "n": "two"}), 400)
    assert "'two'" in error["message"]


def test_large_tools_do_not_stop_the_event_loop(idle_server: ServerProcess) -> None:
    """The text of tools is encoded on a thread, as that of messages is."""
    tool = {"type": "function", "function": {"name": "f", "description": "hello world " * 200_000}}
    thread = threading.Thread(
        target=idle_server.post, args=(CHAT, {"messages": MESSAGES, "tools": [tool]})
    )
    longest_s, num_answers = 0.0, 0
    # One client for all probes: making one takes as long as some of the answers.
    with httpx.Client(base_url=idle_server.url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        thread.start()
        while thread.is_alive():
            begin_s = time.monotonic()
            assert client.get("/health").status_code == 200
            longest_s = max(longest_s, time.monotonic() - begin_s)
            num_answers += 1
    thread.join()
    assert num_answers > 3, f"{num_answers} probes were answered, the slowest in {longest_s:.1f} s"


def test_engine_process_that_is_stopped_is_killed(launch: Callable[..., ServerProcess]) -> None:
    """Nothing in a stopped process can end it, so the API process does; no client waits for ever."""
    server = launch("--watchdog-timeout", "1", fake={"base_us": 20_000})
    statuses: list[int] = []
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
    client = threading.Thread(
        target=lambda: statuses.append(server.post(COMPLETIONS, body).status_code)
    )
    client.start()
    server.wait_running()
    os.kill(server.engine_pid(), signal.SIGSTOP)
    client.join(40)
    assert statuses == [503]
    assert server.wait_exit() == 3


def test_shutdown_does_not_wait_for_a_stopped_engine(launch: Callable[..., ServerProcess]) -> None:
    server = launch("--shutdown-grace-period", "1", fake={"base_us": 20_000})
    texts: list[str] = []
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    client = threading.Thread(target=lambda: texts.append(server.post(COMPLETIONS, body).text))
    client.start()
    server.wait_running()
    os.kill(server.engine_pid(), signal.SIGSTOP)
    server.signal(signal.SIGTERM)
    client.join(30)
    assert "shutting_down" in texts[0].splitlines()[-2]
    assert server.wait_exit() == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "a" * 30_000_000}),
        (COMPLETIONS, {"prompt": ["x", "a" * 30_000_000]}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 30_000_000}]}),
    ],
    ids=["text", "batch", "chat"],
)
def test_text_that_can_never_fit_is_refused_before_it_is_encoded(
    idle_server: ServerProcess, path: str, fields: dict[str, Any]
) -> None:
    """Encoding it took half a minute and gigabytes."""
    begin_s = time.monotonic()
    response = idle_server.post(path, fields)
    check_error(response, 400, code="context_length_exceeded")
    assert "characters" in response.text
    assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize("top_k", [2**31, 2**63, 2**64 - 1])
def test_a_huge_top_k_is_refused(idle_server: ServerProcess, top_k: int) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        check_error(idle_server.post(path, body | {"top_k": top_k}), 400, param="top_k")


def _prompt_tokens(server: ServerProcess) -> list[str]:
    lines = server.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("dsserve_prompt_tokens_total")]


def test_a_pool_smaller_than_the_context_cuts_completions_only(
    launch: Callable[..., ServerProcess],
) -> None:
    server = launch("--allow-auto-truncate", "--max-total-tokens", "128", "--page-size", "16")
    body = {"prompt": [45] * 150, "max_tokens": 3, "min_tokens": 2}
    usage = server.post(COMPLETIONS, body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (126, 3)
    by_default = server.post(COMPLETIONS, {"prompt": [45] * 150}).json()["usage"]
    assert (by_default["prompt_tokens"], by_default["completion_tokens"]) == (128, 1)
    before = _prompt_tokens(server)
    conversation = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 3}
    check_error(server.post(CHAT, conversation), 400)
    assert _prompt_tokens(server) == before, "nothing of it was computed"
