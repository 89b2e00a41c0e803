"""`/v1/chat/completions` against the fake model: thinking, tools, streams, choices, the two profiles."""
# The markers of DeepSeek's format are written with full-width bars.
# ruff: noqa: RUF001

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI, OpenAI

from api_streams import whole_stream
from dsserve.worker.fake_model import fake_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from api_server import ServerProcess

PATH = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
NO_THINKING = {"thinking": {"type": "disabled"}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL_TEXT = (
    "<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="get_weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Hangzhou 世界</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)
EOS = "<｜end▁of▁sentence｜>"


def chat(server: ServerProcess, **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"messages": MESSAGES, "max_tokens": 12} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat_chunks(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "max_tokens": 12, "stream": True} | body
    return whole_stream(server.post(PATH, body))


def joined(chunks: list[dict[str, Any]], field: str, index: int = 0) -> str:
    return "".join(
        choice["delta"].get(field) or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def script(server: ServerProcess, text: str) -> dict[str, Any]:
    """Fields that make the fake model write `text`, whose special tokens are taken as such."""
    body = {"prompt": text, "add_special_tokens": False}
    ids = server.post("/tokenize", body).json()["tokens"]
    return {"custom_params": {"script": {"ids": ids}}, "max_tokens": len(ids) + 4}


def test_answer_has_the_shape_of_openai(idle_server: ServerProcess) -> None:
    answer = chat(idle_server, **NO_THINKING)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


def test_prompt_is_what_tokenize_says(idle_server: ServerProcess) -> None:
    body = {"messages": MESSAGES, **NO_THINKING}
    ids = idle_server.post("/tokenize", body).json()["tokens"]
    answer = chat(idle_server, return_token_ids=True, **NO_THINKING)
    assert answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == fake_output(ids, 12)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_first_chunk_has_the_role_and_last_the_reason(idle_server: ServerProcess) -> None:
    chunks = chat_chunks(idle_server, **NO_THINKING)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    whole = chat(idle_server, **NO_THINKING)["choices"][0]["message"]["content"]
    assert joined(chunks, "content") == whole


def test_thinking_is_on_by_default_and_apart(idle_server: ServerProcess) -> None:
    text = script(idle_server, "Let me see.</think>It is 4." + EOS)
    answer = chat(idle_server, **text)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me see."
    assert message["content"] == "It is 4."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = chat_chunks(idle_server, **text)
    assert joined(chunks, "reasoning_content") == "Let me see."
    assert joined(chunks, "content") == "It is 4."


@pytest.mark.parametrize(
    "off",
    [
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"thinking": False}},
    ],
    ids=str,
)
def test_thinking_can_be_switched_off(idle_server: ServerProcess, off: dict[str, Any]) -> None:
    answer = chat(idle_server, **script(idle_server, "It is 4." + EOS), **off)
    message = answer["choices"][0]["message"]
    assert message["content"] == "It is 4."
    assert not message.get("reasoning_content")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("thinking", [True, False])
def test_tool_call_is_parsed(idle_server: ServerProcess, thinking: bool) -> None:
    prefix = "I should look.</think>" if thinking else ""
    body = script(idle_server, prefix + CALL_TEXT + EOS) | {"tools": [TOOL]}
    body |= {} if thinking else NO_THINKING
    choice = chat(idle_server, **body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Hangzhou 世界"}
    assert "DSML" not in (choice["message"]["content"] or "")
    chunks = chat_chunks(idle_server, **body)
    deltas = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls") or ()
    ]
    assert deltas[0]["id"]
    assert deltas[0]["function"]["name"] == "get_weather"
    arguments = "".join(delta["function"].get("arguments") or "" for delta in deltas)
    assert json.loads(arguments) == {"city": "Hangzhou 世界"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_second_call_ends_the_answer_unless_parallel(idle_server: ServerProcess) -> None:
    two = CALL_TEXT.replace("</｜DSML｜ calls>", "") + CALL_TEXT.removeprefix("<｜DSML｜ calls>\n")
    body = script(idle_server, two + EOS) | {"tools": [TOOL]} | NO_THINKING
    assert len(chat(idle_server, **body)["choices"][0]["message"]["tool_calls"]) == 2
    alone = chat(idle_server, parallel_tool_calls=False, **body)["choices"][0]
    assert len(alone["message"]["tool_calls"]) == 1
    assert alone["finish_reason"] == "tool_calls"


def test_tool_choice_none_reports_no_calls(idle_server: ServerProcess) -> None:
    body = script(idle_server, "Well." + CALL_TEXT + EOS) | {"tools": [TOOL]} | NO_THINKING
    choice = chat(idle_server, tool_choice="none", **body)["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert "DSML" not in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_call_cut_by_length_is_reported_as_it_stands(idle_server: ServerProcess) -> None:
    body = script(idle_server, CALL_TEXT) | {"tools": [TOOL]} | NO_THINKING
    body["max_tokens"] = len(body["custom_params"]["script"]["ids"]) * 2 // 3
    choice = chat(idle_server, **body)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert "DSML" not in (choice["message"]["content"] or "")


def test_reasoning_can_be_part_of_content_or_held(idle_server: ServerProcess) -> None:
    text = script(idle_server, "Let me see.</think>It is 4." + EOS)
    message = chat(idle_server, separate_reasoning=False, **text)["choices"][0]["message"]
    assert "Let me see." in message["content"]
    assert message["content"].endswith("It is 4.")
    chunks = chat_chunks(idle_server, stream_reasoning=False, **text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    held = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert held == ["Let me see."]


def test_ignored_end_of_sequence_goes_on(idle_server: ServerProcess) -> None:
    body = script(idle_server, "one" + EOS + "two" + EOS) | NO_THINKING
    assert chat(idle_server, **body)["choices"][0]["message"]["content"] == "one"
    answer = chat(idle_server, ignore_eos=True, **body)
    assert answer["usage"]["completion_tokens"] == body["max_tokens"]
    assert answer["choices"][0]["message"]["content"].startswith("onetwo")
    assert answer["choices"][0]["finish_reason"] == "length"


def test_several_choices_share_the_prompt(idle_server: ServerProcess) -> None:
    answer = chat(idle_server, n=3, return_token_ids=True, **NO_THINKING)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    chunks = chat_chunks(idle_server, n=3, **NO_THINKING)
    for index, choice in enumerate(answer["choices"]):
        assert joined(chunks, "content", index) == choice["message"]["content"]


def test_stop_string_applies_to_the_answer_only(idle_server: ServerProcess) -> None:
    text = script(idle_server, "one STOP two</think>three STOP four" + EOS)
    answer = chat(idle_server, stop=["STOP"], **text)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "one STOP two"
    assert message["content"] == "three "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["matched_stop"] == "STOP"
    chunks = chat_chunks(idle_server, stop=["never", "STOP"], **text)
    assert joined(chunks, "content") == "three "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["matched_stop"] == "STOP"


def test_unicode_is_whole_in_every_delta(idle_server: ServerProcess) -> None:
    text = "Grüße 世界 👩‍👩‍👧‍👦 🎉"
    body = script(idle_server, text + EOS) | NO_THINKING
    chunks = chat_chunks(idle_server, **body)
    assert joined(chunks, "content") == text
    assert chat(idle_server, **body)["choices"][0]["message"]["content"] == text


def test_max_completion_tokens_is_max_tokens(idle_server: ServerProcess) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 5, **NO_THINKING}
    answer = idle_server.post(PATH, body).json()
    assert answer["usage"]["completion_tokens"] == 5


def test_developer_role_and_history_are_taken(idle_server: ServerProcess) -> None:
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning": "easy"},
        {"role": "user", "content": "And 3 + 3?"},
    ]
    assert chat(idle_server, messages=messages)["choices"]


def test_usage_chunk_and_token_ids_in_a_stream(idle_server: ServerProcess) -> None:
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    chunks = chat_chunks(idle_server, **options, **NO_THINKING)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    ids = [
        token_id
        for chunk in chunks
        for choice in chunk["choices"]
        for token_id in choice.get("token_ids", ())
    ]
    assert ids == fake_output(chunks[0]["prompt_token_ids"], 12)


def test_openai_client_streams_chat(idle_server: ServerProcess) -> None:
    with OpenAI(base_url=idle_server.url + "/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=6, stream=True
        )
        chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_32_parallel_streams_end(idle_server: ServerProcess) -> None:
    async with AsyncOpenAI(base_url=idle_server.url + "/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id

        async def one(index: int) -> str | None:
            reason = None
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Number {index}"}],
                max_tokens=32,
                stream=True,
            )
            async for chunk in stream:
                reason = chunk.choices[0].finish_reason or reason
            return reason

        assert set(await asyncio.gather(*map(one, range(32)))) <= {"stop", "length"}


@pytest.fixture(scope="module")
def deepseek_server(launch: Callable[..., ServerProcess]) -> ServerProcess:
    return launch("--api-profile", "deepseek")


def test_deepseek_profile_puts_usage_into_the_last_chunk(deepseek_server: ServerProcess) -> None:
    chunks = chat_chunks(deepseek_server)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 12


def test_deepseek_profile_refuses_an_unknown_model_with_400(
    deepseek_server: ServerProcess,
) -> None:
    body = {"messages": MESSAGES, "model": "gpt-9"}
    response = deepseek_server.post(PATH, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
