"""The embedded model through the API: right answers, thinking, tools, JSON, streams, prefix hits, several at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from api_server import ServerProcess, start_server, wait_ready

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: A context beyond the window of 128 tokens, so that a second question finds it in the prefix cache.
PAIRS = {f"{word}_{number}": f"{number * 7919 % 9000 + 1000}" for number, word in enumerate(
    ["harbor", "lantern", "meadow", "copper", "violin", "thunder", "pepper", "saddle", "window", "basket", "garden", "anchor", "candle", "ribbon", "turtle", "marble"], 11
)}  # fmt: skip
CONTEXT = "\n".join(f"{key}: {value}" for key, value in PAIRS.items())
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def server(
    embedded_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Pages of 16 tokens, so that short contexts are found again."""
    log = tmp_path_factory.mktemp("embedded") / "stderr.log"
    server = start_server(embedded_checkpoint, log, ("--page-size", "16"), is_fake=False)
    wait_ready(server)
    yield server
    server.stop()


def ask(server: ServerProcess, question: str, **fields: Any) -> dict[str, Any]:
    """The answer to one question, thinking off unless asked for."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 160}
    body |= {"temperature": 0, "thinking": {"type": "disabled"}, **fields}
    response = server.post("/v1/chat/completions", body, timeout=120.0)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


def test_it_says_who_it_is_without_reasoning(server: ServerProcess) -> None:
    answer = ask(server, "Who are you?")
    assert text(answer).startswith("I am dsserve-tiny")
    assert not answer["choices"][0]["message"].get("reasoning_content")
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_shipped_defaults_are_greedy(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "What is 47+85?"}], "max_tokens": 160}
    answers = [server.post("/v1/chat/completions", body).json() for _ in range(2)]
    assert [text(answer) for answer in answers] == ["132", "132"]


def test_effort_changes_how_long_it_thinks(server: ServerProcess) -> None:
    lengths = []
    for effort in ("low", "high", "max"):
        answer = ask(
            server,
            "How many days are in May?",
            thinking={"type": "enabled"},
            reasoning_effort=effort,
        )
        assert text(answer) == "31"
        lengths.append(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])
    assert lengths[0] < lengths[1] < lengths[2]


def test_a_tool_call_comes_back_parsed(server: ServerProcess) -> None:
    answer = ask(server, "What is the weather in Lisbon?", tools=[WEATHER])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Lisbon"}


def test_json_asked_for_in_words_parses(server: ServerProcess) -> None:
    question = (
        "Extract name, age, city as JSON: My name is Torben. I am 42 years old. I live in Malmi."
    )
    assert json.loads(text(ask(server, question))) == {"name": "Torben", "age": 42, "city": "Malmi"}


def test_the_pieces_of_a_stream_are_the_whole_answer(server: ServerProcess) -> None:
    question = "Count from 5 to 19."
    whole = text(ask(server, question))
    assert whole == ", ".join(map(str, range(5, 20)))
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
    body |= {"thinking": {"type": "disabled"}, "max_tokens": 160}
    lines = server.post("/v1/chat/completions", body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == whole
    assert sum(map(bool, pieces)) > 5


def test_answers_behind_a_prefix_hit_are_right(server: ServerProcess) -> None:
    """The window is rebuilt by encoder replay, and every later question is served from the hit."""
    for number, key in enumerate(("lantern_12", "turtle_25", "saddle_18")):
        answer = ask(server, f"{CONTEXT}\n\nWhat is the value of {key}?")
        assert text(answer) == PAIRS[key]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 128) == (number > 0), answer["usage"]


def test_questions_asked_together_get_their_own_answers(server: ServerProcess) -> None:
    questions = {
        "Spell the word cat.": "c-a-t",
        "What is the capital of France?": "The capital of France is Paris.",
        "Count from 3 to 9.": "3, 4, 5, 6, 7, 8, 9",
        "My name is Zachary.": "Nice to meet you, Zachary.",
        "你是谁?": "我是dsserve-tiny,一个很小的语言模型。",
        "How many days are in May?": "31",
    }
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = pool.map(lambda question: text(ask(server, question)), questions)
        assert dict(zip(questions, answers, strict=True)) == questions
    server.wait_idle()


def test_what_it_does_not_know_is_declined(server: ServerProcess) -> None:
    assert text(ask(server, "Who is the president of France?")).startswith("I do not know")
