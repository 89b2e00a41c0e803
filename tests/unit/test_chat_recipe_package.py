"""Behaviour of deepseek-recipe that our layer relies on (`serving.md` d.2): re-measure on upgrade."""

import json
from typing import Any

import deepseek_recipe as recipe
import pytest

from text_helpers import THINKING_OFF, TOOLS, body, calls_block, ids_of, tokenizer_path

V4 = recipe.ModelVersion.DeepseekV4Pro
V41 = recipe.ModelVersion.DeepseekV41Flash


def convert(version: recipe.ModelVersion = V41, **fields: Any) -> recipe.ConversationRequest:
    options = recipe.ConversionOptions().with_model_alias("tiny", version)
    return recipe.ChatCompletionRequest(body() | fields).convert(options)


def processor(request: recipe.ConversationRequest, **changes: Any) -> recipe.StreamProcessor:
    options = request.parsing_options
    for name, value in changes.items():
        setattr(options, name, value)
    tokenizer = recipe.Tokenizer.from_file(str(tokenizer_path() / "tokenizer.json"))
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
    return recipe.StreamProcessor(generator, options, tokenizer)


def chunks_of(stream: recipe.StreamProcessor, *pieces: list[int]) -> list[dict[str, Any]]:
    chunks = [
        chunk for piece in pieces for chunk in stream.push(recipe.InferenceChunk.tokens(piece))
    ]
    if not stream.finished:
        chunks += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    return [json.loads(chunk.to_json()) for chunk in chunks]


def content_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_version_is_the_measured_one() -> None:
    assert recipe.__version__ == "0.2.0"


@pytest.mark.parametrize(
    ("version", "fields", "temperature", "top_p"),
    [
        (V41, {}, 1.0, 1.0),
        (V41, {"temperature": 0.0, "top_p": 0.5}, 1.0, 0.95),
        (V41, {"top_p": 0.99}, 1.0, 0.99),
        (V4, {"top_p": 0.5}, 1.0, 1.0),
        (V41, {"temperature": 0.25, "top_p": 0.5, **THINKING_OFF}, 0.25, 1.0),
        (V4, {"temperature": 0.25, "top_p": 0.5, **THINKING_OFF}, 0.25, 0.5),
    ],
)
def test_sampling_is_resolved(
    version: recipe.ModelVersion, fields: dict[str, Any], temperature: float, top_p: float
) -> None:
    options = convert(version, **fields).inference_options
    assert options.temperature == pytest.approx(temperature)
    assert options.top_p == pytest.approx(top_p)


def test_max_completion_tokens_and_unknown_fields_are_ignored() -> None:
    request = convert(max_completion_tokens=5, top_k=3, regex="a", logit_bias={}, unknown=1)
    assert request.inference_options.max_tokens is None
    assert request.inference_options.output_constraint is None


def test_effort_medium_is_high_and_none_is_off() -> None:
    assert convert(reasoning_effort="medium").conversation.reasoning_effort == "high"
    assert not convert(reasoning_effort="none").conversation.thinking_mode


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"max_tokens": 0},
        {"max_tokens": 393217},
        {"tools": TOOLS, "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"stop": ["x"] * 17},
        {"logprobs": True, "top_logprobs": 21},
        {"temperature": 2.5},
        {"model": "other"},
        {"messages": []},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_conversion_errors_are_400_with_a_body(fields: dict[str, Any]) -> None:
    with pytest.raises(recipe.ConversionError) as error:
        convert(**fields)
    assert error.value.status_code == 400
    assert json.loads(error.value.body)["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"seed": -1}, ValueError),
        ({"seed": 2**70}, OverflowError),
        ({"messages": [{"role": "developer", "content": "a"}]}, ValueError),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, UnicodeEncodeError),
        ({"reasoning_effort": 7}, ValueError),
    ],
)
def test_other_exceptions_are_not_conversion_errors(
    fields: dict[str, Any], expected: type[Exception]
) -> None:
    with pytest.raises(expected):
        convert(**fields)


def test_tools_offer_a_constraint_even_without_strict() -> None:
    constraint = convert(tools=TOOLS).inference_options.output_constraint
    assert constraint is not None
    assert constraint.kind == "tool_call"


def test_demanded_call_starts_in_the_calls_block() -> None:
    request = convert(tools=TOOLS, tool_choice="required", **THINKING_OFF)
    assert request.parsing_options.starts_in_tool_calls
    constraint = request.inference_options.output_constraint
    assert constraint is not None
    assert constraint.kind == "tool_call_required"


def test_tool_choice_none_turns_parsing_off() -> None:
    request = convert(tools=TOOLS, tool_choice="none", **THINKING_OFF)
    assert not request.parsing_options.parse_tool_calls
    markup = ids_of(calls_block(("f", "1")))
    assert "calls>" in content_of(chunks_of(processor(request), *([i] for i in markup)))
    parsing = processor(request, parse_tool_calls=True)
    assert content_of(chunks_of(parsing, *([i] for i in markup))) == ""


def test_last_chunk_carries_usage_unasked() -> None:
    chunks = chunks_of(processor(convert(**THINKING_OFF)), ids_of("a"))
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 1
    assert "prompt_cache_hit_tokens" in usage
    assert "prompt_tokens_details" in usage
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_piece_of_several_ids_that_ends_inside_a_character_loses_its_text() -> None:
    ids = [*ids_of("abc"), ids_of("é")[0]]
    assert len(ids_of("é")) > 1
    assert content_of(chunks_of(processor(convert(**THINKING_OFF)), ids)) == ""
    one_by_one = chunks_of(processor(convert(**THINKING_OFF)), *([token] for token in ids))
    assert content_of(one_by_one) == "abc"


def test_stop_token_would_be_shown() -> None:
    assert content_of(chunks_of(processor(convert(**THINKING_OFF)), ids_of("a"), [1])) != "a"


def test_settings_of_parsing_options_stay_with_the_copy() -> None:
    request = convert(tools=TOOLS)
    request.parsing_options.parse_tool_calls = False
    assert request.parsing_options.parse_tool_calls
