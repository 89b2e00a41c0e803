"""Probes, metrics, information, keys, and what an operator may tell the server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from api_server import ServerProcess

COMPLETIONS = "/v1/completions"
PROMPT = [10, 11, 12, 13]


def metric(server: ServerProcess, name: str, **labels: str) -> float:
    total = 0.0
    for line in server.get("/metrics").text.splitlines():
        found = re.fullmatch(rf"{name}(\{{.*\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(found[2])
    return total


def test_probes_say_that_all_is_well(idle_server: ServerProcess) -> None:
    for path in ("/health", "/ready", "/health_generate"):
        response = idle_server.get(path)
        assert response.status_code == 200, response.text


def test_server_info_shows_configuration_pools_and_versions(idle_server: ServerProcess) -> None:
    info = idle_server.get("/get_server_info").json()
    assert info == idle_server.get("/server_info").json() | {
        "uptime_s": info["uptime_s"],
        "state": info["state"],
    }
    assert info["status"] == "ready"
    assert info["config"]["load_format"] == "fake"
    assert info["config"]["max_running_requests"] > 0
    assert info["state"]["pools"]
    assert info["version"]


def test_model_info_and_list_agree(idle_server: ServerProcess) -> None:
    model = idle_server.get("/v1/models").json()["data"][0]
    info = idle_server.get("/get_model_info").json()
    assert info == idle_server.get("/model_info").json()
    assert info["served_model_name"] == model["id"]
    assert info["max_model_len"] == model["max_model_len"]
    assert idle_server.get(f"/v1/models/{model['id']}").json() == model


def test_loads_are_zero_when_idle(idle_server: ServerProcess) -> None:
    idle_server.wait_idle()
    (load,) = idle_server.get("/v1/loads").json()["loads"]
    assert load["num_open_requests"] == 0


def test_metrics_count_requests_and_tokens(idle_server: ServerProcess) -> None:
    names = [
        "dsserve_num_requests_total",
        "dsserve_generation_tokens_total",
        "dsserve_prompt_tokens_total",
        "dsserve_time_to_first_token_seconds_count",
        "dsserve_e2e_request_latency_seconds_count",
    ]
    before = [metric(idle_server, name) for name in names]
    ok = metric(idle_server, "dsserve_http_requests_total", path=COMPLETIONS, status="200")
    body = {"prompt": PROMPT, "max_tokens": 5}
    assert idle_server.post(COMPLETIONS, body).status_code == 200
    after = [metric(idle_server, name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 5, 4, 1, 1]
    assert (
        metric(idle_server, "dsserve_http_requests_total", path=COMPLETIONS, status="200") == ok + 1
    )


def test_unknown_paths_do_not_make_new_series(idle_server: ServerProcess) -> None:
    for index in range(5):
        idle_server.get(f"/v1/xyzzy-{index}")
    assert "xyzzy" not in idle_server.get("/metrics").text


def test_flush_empties_the_cache_or_says_who_uses_it(idle_server: ServerProcess) -> None:
    prompt = [20 + index % 50 for index in range(1000)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2}
    idle_server.post(COMPLETIONS, body)
    warm = idle_server.post(COMPLETIONS, body).json()["usage"]
    assert warm["prompt_cache_hit_tokens"] > 0
    idle_server.wait_idle()
    assert idle_server.post("/flush_cache").status_code == 200
    cold = idle_server.post(COMPLETIONS, body).json()["usage"]
    assert cold["prompt_cache_hit_tokens"] == 0
    assert idle_server.post("/flush_cache?tier=device").status_code == 200
    assert idle_server.post("/flush_cache?tier=host").status_code == 400
    assert idle_server.post("/flush_cache?tier=attic").status_code == 400


def test_flush_while_busy_is_a_409(idle_server: ServerProcess) -> None:
    # Long enough for pages in the cache, which the running request then holds.
    prompt = [20 + index % 50 for index in range(1000)]
    body = {"prompt": prompt, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", idle_server.url + COMPLETIONS, json=body, timeout=60) as response:
        lines = response.iter_lines()  # kept: a dropped iterator closes the connection
        next(lines)
        busy = idle_server.post("/flush_cache")
    assert busy.status_code == 409
    assert busy.json()["error"]["code"] == "cache_in_use"


def test_tokenize_and_detokenize_are_inverse(idle_server: ServerProcess) -> None:
    text = "Grüße, 世界! 🎉"
    for prefix in ("", "/v1"):
        answer = idle_server.post(f"{prefix}/tokenize", {"prompt": text}).json()
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] > 0
        back = idle_server.post(f"{prefix}/detokenize", {"tokens": answer["tokens"]}).json()
        assert back["text"] == back["prompt"] == text
    batch = idle_server.post("/tokenize", {"prompt": [text, "x"]}).json()
    texts = idle_server.post("/detokenize", {"tokens": batch["tokens"]}).json()["text"]
    assert texts == [text, "x"]
    assert idle_server.post("/detokenize", {"tokens": []}).json()["text"] == ""
    body = {"prompt": [text, "x"], "return_token_strs": True}
    strings = idle_server.post("/tokenize", body).json()["token_strs"]
    assert [len(row) for row in strings] == batch["count"]
    assert strings[1][-1] == "x"
    both = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert idle_server.post("/tokenize", both).status_code == 400


def test_openapi_document_describes_the_bodies(idle_server: ServerProcess) -> None:
    document = idle_server.get("/openapi.json").json()
    for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize"):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"]["properties"]
    assert "#/$defs" not in str(document)


@pytest.fixture(scope="module")
def keyed_server(launch: Callable[..., ServerProcess]) -> ServerProcess:
    return launch("--api-key", "alpha", "--api-key", "beta", "--admin-api-key", "gamma")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic alpha"}, 401),
        ({"x-api-key": "alph"}, 401),
        ({"authorization": "Bearer alpha"}, 200),
        ({"authorization": "bearer beta"}, 200),
        ({"x-api-key": "beta"}, 200),
        ({"x-api-key": "gamma"}, 200),
    ],
    ids=str,
)
def test_api_key_is_asked_for(
    keyed_server: ServerProcess, headers: dict[str, str], status: int
) -> None:
    response = keyed_server.post(COMPLETIONS, {"prompt": PROMPT}, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_probes_and_metrics_need_no_key(keyed_server: ServerProcess) -> None:
    for path in ("/health", "/ready", "/health_generate", "/metrics"):
        assert keyed_server.get(path).status_code == 200, path
    assert keyed_server.get("/get_server_info").status_code == 401


def test_admin_paths_need_the_admin_key(keyed_server: ServerProcess) -> None:
    everyone = {"abort_all": True}
    for path, body in (("/flush_cache", None), ("/abort_request", everyone)):
        assert keyed_server.post(path, body).status_code == 401
        user = keyed_server.post(path, body, headers={"x-api-key": "alpha"})
        assert user.status_code == 403
        admin = keyed_server.post(path, body, headers={"x-api-key": "gamma"})
        assert admin.status_code == 200, admin.text
    one = keyed_server.post("/abort_request", {"rid": "x"}, headers={"x-api-key": "alpha"})
    assert one.status_code == 200


def test_keys_are_not_shown(keyed_server: ServerProcess) -> None:
    info = keyed_server.get("/get_server_info", headers={"x-api-key": "alpha"}).text
    for key in ("alpha", "beta", "gamma"):
        assert key not in info
