"""`--enable-deterministic-inference`: a request's output does not depend on what was cached or what runs beside it.

That retraction changes nothing without replay is tested in `test_same_tokens.py`, with drafts in `test_draft_tokens.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from api_server import ServerProcess, start_server, wait_ready
from golden_runs import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
PATIENCE_S = 300
NUM_TOKENS, NUM_CHOICES = 24, 4
PROMPT = prompt_ids(CHECKPOINT, "len17")
OTHER = PROMPT[::-1]
FLAGS = ("--enable-deterministic-inference", "--max-running-requests", "8")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_server(
        CHECKPOINT, tmp_path_factory.mktemp("server") / "log", FLAGS, is_fake=False
    )
    try:
        wait_ready(started)
        yield started
    finally:
        started.stop()


def sampled(server: ServerProcess, prompt: list[int], **fields: Any) -> list[list[int]]:
    """Ids of every choice, drawn at temperature 1; nothing of the prompt may come from the cache."""
    response = server.post(
        "/v1/completions",
        {
            "model": CHECKPOINT.name,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        },
        timeout=PATIENCE_S,
    )
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return [choice["token_ids"] for choice in body["choices"]]


def test_outputs_are_the_same_alone_again_and_side_by_side(
    server: ServerProcess,
) -> None:
    alone, other = sampled(server, PROMPT), sampled(server, OTHER)
    # The default seed is 0, and choice i has seed + i.
    assert alone == sampled(server, PROMPT, seed=0), "or: a prompt that was computed before"
    last = sampled(server, PROMPT, seed=NUM_CHOICES - 1)
    assert alone != last
    with ThreadPoolExecutor(2) as threads:
        many = threads.submit(sampled, server, PROMPT, n=NUM_CHOICES)
        beside = threads.submit(sampled, server, OTHER)
    choices = many.result()
    assert [choices[0], choices[-1]] == [*alone, *last]
    assert beside.result() == other


def test_the_server_says_what_it_turned_off(server: ServerProcess) -> None:
    info = server.get("/get_server_info").json()
    text = str(info)
    assert "'encoder_replay': False" in text
    assert "'decoder_replay': False" in text
    assert "no prefix hits" in server.log.read_text()
