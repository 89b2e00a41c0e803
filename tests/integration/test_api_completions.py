"""`/v1/completions` against the fake model: every form of prompt, streams, stops, limits, usage."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from api_streams import whole_stream
from dsserve.worker.fake_model import fake_output

if TYPE_CHECKING:
    from api_server import ServerProcess

PATH = "/v1/completions"
PROMPT = [10, 11, 12, 13, 14]


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"prompt": PROMPT, "max_tokens": 8} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def encode(server: ServerProcess, text: str, **options: Any) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": text} | options).json()["tokens"]
    return ids


def decode(server: ServerProcess, ids: list[int]) -> str:
    text: str = server.post("/detokenize", {"tokens": ids}).json()["text"]
    return text


def test_token_prompt_gives_the_fake_models_ids(idle_server: ServerProcess) -> None:
    answer = complete(idle_server, return_token_ids=True, temperature=0)
    choice = answer["choices"][0]
    assert choice["token_ids"] == fake_output(PROMPT, 8)
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == decode(idle_server, choice["token_ids"])
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["system_fingerprint"].startswith("fp_")


def test_text_prompt_is_encoded_as_tokenize_says(idle_server: ServerProcess) -> None:
    ids = encode(idle_server, "Once upon")
    answer = complete(idle_server, prompt="Once upon", return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == fake_output(ids, 8)
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    "prompt", [["alpha", "beta", "gamma"], [[10, 11], [12, 13, 14], [15]]], ids=["texts", "ids"]
)
def test_prompt_lists_give_choices_in_order(idle_server: ServerProcess, prompt: list[Any]) -> None:
    answer = complete(idle_server, prompt=prompt, n=2, return_token_ids=True)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for position, part in enumerate(prompt):
        ids = part if isinstance(part, list) else encode(idle_server, part)
        for choice in choices[2 * position : 2 * position + 2]:
            assert choice["prompt_token_ids"] == ids
            assert choice["token_ids"] == fake_output(ids, 8)
    prompts = [choice["prompt_token_ids"] for choice in choices[::2]]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 6 * 8


def test_stream_is_the_whole_text_in_pieces(idle_server: ServerProcess) -> None:
    whole = complete(idle_server)["choices"][0]["text"]
    body = {"prompt": PROMPT, "max_tokens": 8, "stream": True}
    chunks = whole_stream(idle_server.post(PATH, body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len(chunks) > 1
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_chunk_comes_last_with_empty_choices(idle_server: ServerProcess) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 8,
        "stream": True,
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    chunks = whole_stream(idle_server.post(PATH, body))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    assert chunks[-1]["usage"]["prompt_tokens"] == len(PROMPT)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_continuous_usage_grows_with_each_chunk(idle_server: ServerProcess) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 8,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    chunks = whole_stream(idle_server.post(PATH, body))
    counted = 0
    for chunk in chunks:
        counted += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == counted
    assert counted == 8
    assert chunks[0]["choices"][0]["prompt_token_ids"] == PROMPT


def test_usage_tells_cached_tokens_in_all_styles(idle_server: ServerProcess) -> None:
    prompt = [20 + index % 50 for index in range(1000)]
    cold = complete(idle_server, prompt=prompt, cache_salt="usage")["usage"]
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert (cold["prompt_cache_hit_tokens"], cold["prompt_cache_miss_tokens"]) == (0, 1000)
    warm = complete(idle_server, prompt=prompt, cache_salt="usage")["usage"]
    cached = warm["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < 1000
    assert warm["prompt_cache_hit_tokens"] == cached
    assert warm["prompt_cache_miss_tokens"] == 1000 - cached
    assert warm["completion_tokens_details"]["reasoning_tokens"] == 0
    assert warm["total_tokens"] == 1008
    other = complete(idle_server, prompt=prompt, cache_salt="another")["usage"]
    assert other["prompt_cache_hit_tokens"] == 0, "another salt is another cache"
    other = complete(idle_server, prompt=prompt, extra_key="usage")["usage"]
    assert other["prompt_cache_hit_tokens"] == 0, "another extra_key is another cache"


def test_stop_string_that_spans_tokens_cuts_before_it(idle_server: ServerProcess) -> None:
    text = complete(idle_server, max_tokens=32)["choices"][0]["text"]
    stop = text[10:15]
    expected = text[: text.index(stop)]
    choice = complete(idle_server, max_tokens=32, stop=stop, return_token_ids=True)["choices"][0]
    assert choice["text"] == expected
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    assert decode(idle_server, choice["token_ids"]).endswith(stop)
    body = {"prompt": PROMPT, "max_tokens": 32, "stop": ["not there", stop], "stream": True}
    chunks = whole_stream(idle_server.post(PATH, body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_stop_pattern_cuts_before_the_first_complete_match(idle_server: ServerProcess) -> None:
    text = complete(idle_server, max_tokens=32)["choices"][0]["text"]
    stop = text[10:15]
    pattern = re.escape(stop[:-1]) + "."
    expected = text[: text.index(stop)]
    choice = complete(idle_server, max_tokens=32, stop_regex=pattern)["choices"][0]
    assert choice["text"] == expected
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", pattern)
    body = {"prompt": PROMPT, "max_tokens": 32, "stop_regex": ["not here", pattern]}
    chunks = whole_stream(idle_server.post(PATH, body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert chunks[-1]["choices"][0]["stop_reason"] == pattern
    kept = complete(idle_server, max_tokens=32, stop_regex=pattern, no_stop_trim=True)
    assert kept["choices"][0]["text"] == expected + stop


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", "a$", "a*", "a" * 1025, "", ["a"] * 17, 5])
def test_stop_pattern_that_cannot_be_used_is_a_400(
    idle_server: ServerProcess, pattern: Any
) -> None:
    for stream in (False, True):
        body = {"prompt": PROMPT, "max_tokens": 2, "stop_regex": pattern, "stream": stream}
        response = idle_server.post(PATH, body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("stop_regex")


def test_stop_string_is_counted_up_to_its_last_token(idle_server: ServerProcess) -> None:
    ids = fake_output(PROMPT, 32)
    stop = decode(idle_server, ids[4:7])
    answer = complete(idle_server, max_tokens=32, stop=stop)
    assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
def test_stop_string_stays_when_asked(idle_server: ServerProcess, field: str) -> None:
    text = complete(idle_server, max_tokens=32)["choices"][0]["text"]
    stop = text[10:15]
    kept = complete(idle_server, max_tokens=32, stop=stop, **{field: True})["choices"][0]["text"]
    assert kept == text[: text.index(stop)] + stop


def test_stop_token_ends_and_is_counted_but_not_shown(idle_server: ServerProcess) -> None:
    ids = fake_output(PROMPT, 16)
    stop = ids[6]
    length = ids.index(stop)
    answer = complete(idle_server, max_tokens=16, stop_token_ids=[stop], return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"] == decode(idle_server, ids[:length])
    assert choice["token_ids"] == ids[: length + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == length + 1
    kept = complete(idle_server, max_tokens=16, stop_token_ids=[stop], no_stop_trim=True)
    assert kept["choices"][0]["text"] == decode(idle_server, ids[: length + 1])


def test_end_of_sequence_stops_unless_ignored(idle_server: ServerProcess) -> None:
    eos = idle_server.get("/get_server_info").json()["engine"]["eos_token_ids"][0]
    script = {"script": {"ids": [40, 41, eos, 42, 43]}}
    choice = complete(idle_server, custom_params=script, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [40, 41, eos]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["text"] == decode(idle_server, [40, 41])
    body = {"custom_params": script, "max_tokens": 5, "return_token_ids": True}
    ignored = complete(idle_server, ignore_eos=True, **body)["choices"][0]
    assert ignored["token_ids"] == [40, 41, eos, 42, 43]
    assert ignored["finish_reason"] == "length"


def test_echo_repeats_the_prompt(idle_server: ServerProcess) -> None:
    plain = complete(idle_server, prompt="Once upon")["choices"][0]["text"]
    echoed = complete(idle_server, prompt="Once upon", echo=True)["choices"][0]["text"]
    assert echoed == "Once upon" + plain
    body = {"prompt": PROMPT, "max_tokens": 8, "echo": True, "stream": True}
    chunks = whole_stream(idle_server.post(PATH, body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(
        decode(idle_server, PROMPT)
    )


def test_unicode_arrives_whole_in_every_piece(idle_server: ServerProcess) -> None:
    text = "Grüße 世界 👩‍👩‍👧‍👦 🎉 ñ"
    ids = encode(idle_server, text, add_special_tokens=False)
    script = {"custom_params": {"script": {"ids": ids}}, "max_tokens": len(ids)}
    assert complete(idle_server, **script)["choices"][0]["text"] == text
    response = idle_server.post(PATH, {"prompt": PROMPT, "stream": True} | script)
    chunks = whole_stream(response)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_text_cut_inside_a_character_ends_in_one_replacement(idle_server: ServerProcess) -> None:
    ids = encode(idle_server, "👩", add_special_tokens=False)
    if len(ids) < 2:
        pytest.skip("the tokenizer has this character as one token")
    script = {"custom_params": {"script": {"ids": ids[:-1]}}, "max_tokens": len(ids) - 1}
    assert complete(idle_server, **script)["choices"][0]["text"] == "\ufffd"


def test_defaults_are_sixteen_tokens_of_the_served_model(idle_server: ServerProcess) -> None:
    answer = idle_server.post(PATH, {"prompt": PROMPT}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["model"] == idle_server.get("/v1/models").json()["data"][0]["id"]


def test_client_id_names_the_answer(idle_server: ServerProcess) -> None:
    assert complete(idle_server, rid="my-call")["id"] == "my-call"
    assert complete(idle_server, request_id="my-other-call")["id"] == "my-other-call"


def test_unknown_fields_are_ignored(idle_server: ServerProcess) -> None:
    assert complete(idle_server, frobnicate={"a": 1}, user="me", metadata={"k": "v"})["choices"]


def test_sampling_fields_are_taken(idle_server: ServerProcess) -> None:
    answer = complete(
        idle_server,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.05,
        seed=-3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"5": 1.5, "6": -100},
        min_tokens=2,
        n=3,
    )
    assert len(answer["choices"]) == 3


def test_openai_client_gets_its_types(idle_server: ServerProcess) -> None:
    with OpenAI(base_url=idle_server.url + "/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt="Hello", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        text = "".join(
            chunk.choices[0].text
            for chunk in client.completions.create(
                model=model, prompt="Hello", max_tokens=4, stream=True
            )
        )
        assert text == answer.choices[0].text


async def test_many_streams_at_once_get_their_own_text(idle_server: ServerProcess) -> None:
    async with AsyncOpenAI(base_url=idle_server.url + "/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id

        async def one(index: int) -> str:
            stream = await client.completions.create(
                model=model, prompt=[index, 20, 30], max_tokens=24, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(index) for index in range(3, 67)))
    async with httpx.AsyncClient(base_url=idle_server.url) as raw:
        for index, text in enumerate(texts, start=3):
            ids = fake_output([index, 20, 30], 24)
            answer = await raw.post("/detokenize", json={"tokens": ids})
            assert text == answer.json()["text"]
