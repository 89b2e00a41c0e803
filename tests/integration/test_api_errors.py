"""Bad input: one clear error each, always with OpenAI's body, and the server goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from api_errors import check_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from api_server import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "a", "parameters": {"type": "object"}},
}


RAW_BODIES = {
    "malformed": b'{"prompt": "x"',
    "not JSON": b"hello",
    "an array": b"[1, 2]",
    "a string": b'"x"',
    "null": b"null",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "too large a number": b'{"prompt": "x", "temperature": 1e400}',
    "lone surrogate": b'{"prompt": "\\ud83d"}',
    "lone low surrogate": b'{"prompt": "\\udc00x"}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "surrogate bytes": b'{"prompt": "\xed\xa0\x80"}',
    "trailing text": b'{"prompt": "x"} {}',
    "deep nesting": b"[" * 100_000,
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize("name", RAW_BODIES)
def test_broken_json_is_a_400(idle_server: ServerProcess, path: str, name: str) -> None:
    response = idle_server.post(path, content=RAW_BODIES[name])
    check_error(response, 400, code="invalid_json")


WRONG_COMMON: list[tuple[str, Any]] = [
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", "8"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 10**30),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("seed", "abc"),
    ("seed", 2**64),
    ("n", 0),
    ("n", 1000),
    ("n", "2"),
    ("stream", "yes"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", ["x"] * 17),
    ("stop_token_ids", "5"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**7]),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"10000000": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", [1]),
    ("min_tokens", -1),
    ("min_tokens", 10_000_000),
    ("custom_params", {"script": {"ids": [-1]}}),
    ("custom_params", {"script": {"ids": [10**7]}}),
    ("custom_params", {"script": {"ids": "abc"}}),
    ("custom_params", {"script": 5}),
    ("custom_params", {"scripted": {}}),
    ("cache_salt", 5),
    ("extra_key", []),
    ("rid", ""),
    ("rid", 7),
    ("stream_options", {"include_usage": True}),
    ("stream_options", "x"),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), WRONG_COMMON, ids=str)
def test_wrong_value_is_a_400_in_both_apis(
    idle_server: ServerProcess, field: str, value: Any
) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})):
        error = check_error(idle_server.post(path, body | {"max_tokens": 8} | {field: value}), 400)
        assert field in f"{error['param']} {error['message']}"


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {}, [], [[]], [1, "a"], ["a", 1], [1.5], [-1], [True], [[1], "a"], [10**7], [2**40]],
    ids=str,
)
def test_wrong_prompt_is_a_400(idle_server: ServerProcess, prompt: Any) -> None:
    check_error(idle_server.post(COMPLETIONS, {"prompt": prompt}), 400, param="prompt")
    check_error(idle_server.post(COMPLETIONS, {}), 400, param="prompt")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "Hi",
        [],
        {},
        [5],
        ["Hi"],
        [{}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "Hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    ],
    ids=str,
)
def test_wrong_messages_are_a_400(idle_server: ServerProcess, messages: Any) -> None:
    check_error(idle_server.post(CHAT, {"messages": messages}), 400)


NOT_WORKING: dict[str, Any] = {
    "prompt_logprobs": 1,
    "response_format": {"type": "json_object"},
    "regex": "a+",
    "ebnf": "root ::= 'a'",
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "priority": 3,
    "data_parallel_rank": 1,
    "images": ["x"],
    "use_beam_search": True,
    "best_of": 2,
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "lora_path": "x",
    "return_hidden_states": True,
    "truncate_prompt_tokens": 5,
}


@pytest.mark.parametrize("field", NOT_WORKING)
def test_known_field_that_does_not_work_is_named(idle_server: ServerProcess, field: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})):
        response = idle_server.post(path, body | {field: NOT_WORKING[field]})
        error = check_error(response, 400, code="unsupported_parameter", param=field)
        assert field in error["message"]
        allowed = idle_server.post(path, body | {"max_tokens": 2, field: None})
        assert allowed.status_code == 200, allowed.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"logprobs": 0}),
        (COMPLETIONS, {"logprobs": 5}),
        (COMPLETIONS, {"suffix": "end"}),
        (CHAT, {"logprobs": True}),
        (CHAT, {"top_logprobs": 2}),
        (CHAT, {"reasoning_effort": 0.5}),
        (CHAT, {"functions": []}),
        (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"include_stop_str_in_output": True}),
        (CHAT, {"stop_regex": "a"}),
    ],
    ids=str,
)
def test_field_of_one_api_that_does_not_work_is_named(
    idle_server: ServerProcess, path: str, fields: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": MESSAGES}
    name = next(iter(fields))
    response = idle_server.post(path, body | fields)
    check_error(response, 400, code="unsupported_parameter", param=name)


def test_strict_tool_is_refused_by_its_place(idle_server: ServerProcess) -> None:
    strict = {"type": "function", "function": TOOL["function"] | {"name": "b", "strict": True}}
    response = idle_server.post(CHAT, {"messages": MESSAGES, "tools": [TOOL, strict]})
    check_error(response, 400, code="unsupported_parameter", param="tools[1].function.strict")


def test_demanded_tool_call_is_refused_while_thinking(idle_server: ServerProcess) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "a"}}):
        body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice}
        check_error(idle_server.post(CHAT, body), 400)


def test_unknown_model_is_a_404(idle_server: ServerProcess) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})):
        response = idle_server.post(path, body | {"model": "gpt-9"})
        check_error(response, 404, code="model_not_found", param="model")
    check_error(idle_server.get("/v1/models/gpt-9"), 404, code="model_not_found")


def test_too_long_prompt_names_the_limit(idle_server: ServerProcess) -> None:
    limit = idle_server.get("/v1/models").json()["data"][0]["max_model_len"]
    response = idle_server.post(COMPLETIONS, {"prompt": [5] * limit, "max_tokens": 1})
    error = check_error(response, 400, code="context_length_exceeded")
    assert str(limit) in error["message"]
    response = idle_server.post(COMPLETIONS, {"prompt": [5, 6], "max_tokens": limit})
    check_error(response, 400, code="context_length_exceeded", param="max_tokens")
    long = [{"role": "user", "content": "word " * limit}]
    response = idle_server.post(CHAT, {"messages": long})
    check_error(response, 400, code="context_length_exceeded")


def test_unknown_path_and_wrong_method(idle_server: ServerProcess) -> None:
    check_error(idle_server.get("/v1/nothing"), 404, code="not_found")
    for method in ("GET", "PUT", "DELETE"):
        response = idle_server.request(method, COMPLETIONS)
        check_error(response, 405, code="method_not_allowed")
        assert "POST" in response.headers["allow"]
    check_error(idle_server.post("/health"), 405, code="method_not_allowed")


def test_body_above_the_limit_is_a_413(idle_server: ServerProcess) -> None:
    big = b'{"prompt": "' + b"x" * 70_000_000 + b'"}'
    response = idle_server.post(COMPLETIONS, content=big)
    check_error(response, 413, code="payload_too_large")


def test_streamed_body_above_the_limit_is_a_413(idle_server: ServerProcess) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(70):
            yield b"x" * 1_000_000

    response = idle_server.post(COMPLETIONS, content=pieces())
    check_error(response, 413, code="payload_too_large")


def test_request_id_is_echoed_or_made(idle_server: ServerProcess) -> None:
    response = idle_server.get("/health", headers={"x-request-id": "abc-123"})
    assert response.headers["x-request-id"] == "abc-123"
    made = idle_server.get("/health").headers["x-request-id"]
    assert made
    odd = idle_server.get("/health", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"


def test_nan_of_the_model_ends_only_its_request(idle_server: ServerProcess) -> None:
    script = {"custom_params": {"script": {"ids": [40, 41, 42], "nan_at": 2}}}
    body = {"prompt": "Hi", "max_tokens": 8} | script
    response = idle_server.post(COMPLETIONS, body)
    check_error(response, 500, code="nan_detected")
    streamed = idle_server.post(COMPLETIONS, body | {"stream": True})
    assert streamed.status_code == 200
    assert "[DONE]" not in streamed.text
    last = streamed.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "nan_detected"
    assert idle_server.post(COMPLETIONS, {"prompt": "Hi"}).status_code == 200
