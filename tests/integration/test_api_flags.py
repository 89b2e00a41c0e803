"""Launch flags that change what the API does."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api_streams import whole_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from api_server import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def odd_server(launch: Callable[..., ServerProcess]) -> ServerProcess:
    """One server for the flags that do not get in each other's way."""
    flags = ["--stream-interval", "4", "--disable-metrics", "--max-payload-size", "4096"]
    flags += ["--log-requests", "--log-requests-level", "2", "--served-model-name", "my/model"]
    flags += ["--context-length", "256", "--api-key", "sesame"]
    return launch(*flags)


KEY = {"x-api-key": "sesame"}


def test_stream_interval_joins_tokens_but_not_the_first(odd_server: ServerProcess) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 13, "return_token_ids": True}
    chunks = whole_stream(odd_server.post(COMPLETIONS, body | {"stream": True}, headers=KEY))
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sizes[0] >= 1
    assert all(size >= 4 for size in sizes[1:-1])
    assert sum(sizes) == 13
    whole = odd_server.post(COMPLETIONS, body, headers=KEY).json()["choices"][0]["text"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_served_name_payload_limit_context_and_metrics(odd_server: ServerProcess) -> None:
    model = odd_server.get("/v1/models/my/model", headers=KEY).json()
    assert (model["id"], model["max_model_len"]) == ("my/model", 256)
    assert odd_server.get("/metrics").status_code == 404
    big = odd_server.post(COMPLETIONS, {"prompt": "x" * 5000}, headers=KEY)
    assert big.status_code == 413
    long = odd_server.post(COMPLETIONS, {"prompt": [5] * 256}, headers=KEY)
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_requests_are_logged_with_cut_texts_and_without_keys(odd_server: ServerProcess) -> None:
    body = {"prompt": "find this text " * 30, "max_tokens": 4, "rid": "logged-1"}
    assert odd_server.post(COMPLETIONS, body, headers=KEY).status_code == 200
    lines = [line for line in odd_server.log.read_text().splitlines() if "logged-1" in line]
    taken, ended = lines
    assert "find this text find" in taken
    assert "temperature=" in taken
    assert len(taken) < 1000, "the text is cut"
    assert "finish='length'" in ended
    assert "output_tokens=4" in ended
    assert "sesame" not in odd_server.log.read_text()


async def test_full_queue_is_a_503_before_the_first_byte(
    launch: Callable[..., ServerProcess],
) -> None:
    server = launch(
        "--max-running-requests", "1", "--max-queued-requests", "1", fake={"base_us": 2000}
    )
    body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        responses = await asyncio.gather(
            *(client.post(COMPLETIONS, json=body | {"stream": i % 2 == 0}) for i in range(8))
        )
    refused = [response for response in responses if response.status_code == 503]
    assert {response.status_code for response in responses} == {200, 503}
    for response in refused:
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
    aborted = server.get("/metrics").text
    (count,) = re.findall(
        r'^dsserve_num_aborted_requests_total\{.*reason="rejected".*\} (\S+)$', aborted, re.M
    )
    assert float(count) == len(refused)
    server.wait_idle()
