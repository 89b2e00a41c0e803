"""Drafts over HTTP: per-request wishes, what usage and the metrics say; the fake model drafts by a pattern."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from api_streams import whole_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from api_server import ServerProcess

PATTERN = [2, 0, 3, 1]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def drafting(launch: Callable[..., ServerProcess]) -> ServerProcess:
    """Blocks of three drafts."""
    return launch(
        *("--max-total-tokens", "16384", "--speculative-num-draft-tokens", "4"),
        fake={"draft_accept": PATTERN},
    )


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True}
    response = server.post("/v1/completions", body | {"return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def details(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]["completion_tokens_details"]
    return usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]


def token_ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_usage_tells_accepted_and_rejected_drafts(drafting: ServerProcess) -> None:
    answer = complete(drafting)
    accepted, rejected = details(answer)
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    # Every token but the first is a draft, or the one behind the accepted drafts of a step.
    assert 0 < accepted < NUM_TOKENS - 1
    assert rejected > 0
    drafting.wait_idle()


def test_a_request_may_want_no_drafts_or_fewer(drafting: ServerProcess) -> None:
    whole = complete(drafting)
    without = complete(drafting, speculative={"enabled": False})
    short = complete(drafting, speculative={"draft_len": 1})
    assert token_ids(whole) == token_ids(without) == token_ids(short)
    assert details(without) == (0, 0)
    # One draft a step: there are as many verifications as drafts.
    assert 0 < sum(details(short)) <= NUM_TOKENS
    assert details(short)[0] < details(whole)[0]


def test_a_stream_tells_the_same_usage(drafting: ServerProcess) -> None:
    whole = complete(drafting)
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = whole_stream(drafting.post("/v1/completions", body))
    usage = [chunk["usage"] for chunk in chunks if isinstance(chunk, dict) and chunk.get("usage")]
    assert usage[-1]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculative": {"draft_len": 4}}, "speculative.draft_len"),
        ({"speculative": {"draft_len": -1}}, "speculative.draft_len"),
        ({"speculative": {"drafts": 1}}, "speculative.drafts"),
        ({"speculative": {"enabled": 1}}, "speculative.enabled"),
        ({"custom_params": {"simulate_accept_len": 4.5}}, "custom_params.simulate_accept_len"),
        ({"custom_params": {"simulate_accept_len": 0}}, "custom_params.simulate_accept_len"),
    ],
)
def test_impossible_wishes_are_refused(
    drafting: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    response = drafting.post("/v1/completions", {"prompt": "a", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_server_without_drafts_has_nothing_to_tell(idle_server: ServerProcess) -> None:
    answer = complete(idle_server, speculative={"enabled": False})
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    for fields in (
        {"speculative": {"draft_len": 1}},
        {"custom_params": {"simulate_accept_len": 2}},
    ):
        response = idle_server.post("/v1/completions", {"prompt": "a", **fields})
        assert response.status_code == 400, response.text


def test_metrics_tell_what_became_of_drafts(drafting: ServerProcess) -> None:
    """The counters grow by what the usage of one more request says; they come with the next heartbeat."""
    before = drafts_of(drafting)
    accepted, rejected = details(complete(drafting))
    wanted = before[0] + accepted, before[1] + accepted + rejected
    deadline_s = time.monotonic() + 30
    while drafts_of(drafting) != wanted:
        assert time.monotonic() < deadline_s, (drafts_of(drafting), wanted)
        time.sleep(0.1)


def drafts_of(server: ServerProcess) -> tuple[int, int]:
    """Accepted and verified draft tokens, all in all."""
    accepted = verified = 0.0
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("dsserve_spec_accepted_tokens_total{"):
            accepted += float(line.rsplit(" ", 1)[1])
        if line.startswith("dsserve_spec_verified_tokens_total{"):
            verified += float(line.rsplit(" ", 1)[1])
    return int(accepted), int(verified)
