"""Golden prompts as token ids over HTTP: `dsserve launch` on checkpoint A, with and without bounded replay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from api_server import ServerProcess, start_server, wait_ready
from golden_runs import golden, prompt_ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_REPLAY = ("--disable-encoder-swa-bounded-replay", "--disable-decoder-swa-bounded-replay")
SIZES = ("--max-running-requests", "16", "--max-total-tokens", "4096")


def serve(path: Path, log: Path, *flags: str) -> Iterator[ServerProcess]:
    server = start_server(path, log, (*SIZES, *flags), is_fake=False)
    try:
        wait_ready(server)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def exact_server(
    golden_a: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Both replays off: full prefill, no prefix hits."""
    yield from serve(golden_a, tmp_path_factory.mktemp("exact") / "log", *NO_REPLAY)


@pytest.fixture(scope="module")
def replay_server(
    golden_a: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The defaults of a V4.1 model."""
    yield from serve(golden_a, tmp_path_factory.mktemp("replay") / "log")


def complete(server: ServerProcess, ids: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Greedy continuation and the number of cached prompt tokens."""
    response = server.post(
        "/v1/completions",
        {
            "model": "v41-tiny-a",
            "prompt": ids,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert response.status_code == 200, response.text
    body = response.json()
    details = body["usage"]["prompt_tokens_details"]
    return body["choices"][0]["token_ids"], details["cached_tokens"]


def tokens(path: Path, key: str) -> list[int]:
    values: list[int] = golden(path, "released")[key].tolist()
    return values


@pytest.mark.parametrize("prompt", ["len17", "len64"])
def test_without_replay_the_full_greedy_tokens_are_served(
    exact_server: ServerProcess, golden_a: Path, prompt: str
) -> None:
    expected = tokens(golden_a, f"{prompt}.greedy.tokens")
    ids, cached = complete(exact_server, prompt_ids(golden_a, prompt), len(expected))
    assert (ids, cached) == (expected, 0)


def test_without_replay_requests_side_by_side_get_the_same_tokens(
    exact_server: ServerProcess, golden_a: Path
) -> None:
    prompts = ["len17", "len64"] * 3
    with ThreadPoolExecutor(len(prompts)) as threads:
        results = list(
            threads.map(
                lambda prompt: complete(exact_server, prompt_ids(golden_a, prompt), 32), prompts
            )
        )
    expected = [(tokens(golden_a, f"{prompt}.greedy.tokens"), 0) for prompt in prompts]
    assert results == expected
    exact_server.wait_idle()


def flush(server: ServerProcess) -> None:
    server.wait_idle()
    assert server.post("/flush_cache").status_code == 200


@pytest.mark.parametrize("prompt", ["len64", "len100"])
def test_with_replay_a_cold_prompt_gets_the_tokens_of_decoder_replay(
    replay_server: ServerProcess, golden_a: Path, prompt: str
) -> None:
    flush(replay_server)
    expected = tokens(golden_a, f"{prompt}.replay.tokens")
    ids, cached = complete(replay_server, prompt_ids(golden_a, prompt), len(expected))
    assert (ids, cached) == (expected, 0)


@pytest.mark.parametrize(("prompt", "prefix"), [("len100", 48), ("len90", 64)])
def test_with_replay_a_hit_gets_the_tokens_of_both_replays(
    replay_server: ServerProcess, golden_a: Path, prompt: str, prefix: int
) -> None:
    flush(replay_server)
    ids = prompt_ids(golden_a, prompt)
    complete(replay_server, ids[:prefix], 1)
    expected = tokens(golden_a, f"{prompt}.replay.prefix{prefix}.tokens")
    assert complete(replay_server, ids, len(expected)) == (expected, prefix)
    replay_server.wait_idle()
