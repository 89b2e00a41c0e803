"""Wrong and not yet working chat fields: a 400 that names the field, whatever the recipe raises."""

import logging
from typing import Any

import pytest

from dsserve.chat.guard import body_hash, recipe_errors
from dsserve.errors import ConfigError, InvalidRequest, Unsupported
from text_helpers import THINKING_OFF, TOOLS, body, convert, converter

STRICT = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("response_format", {"response_format": {"type": "regex", "regex": "a"}}),
        ("response_format", {"response_format": "text"}),
        ("tools[0].function.strict", {"tools": STRICT}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}),
        (
            "tool_choice",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ("regex", {"regex": "a"}),
        ("ebnf", {"ebnf": "root ::= x"}),
        ("structural_tag", {"structural_tag": "{}"}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("guided_json", {"guided_json": {}}),
        ("stop_regex", {"stop_regex": "a"}),
        ("task", {"task": "title"}),
        ("functions", {"functions": []}),
        ("chat_template_kwargs.drop_thinking", {"chat_template_kwargs": {"drop_thinking": True}}),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image_url",
                                "image_url": {"url": "data:image/png;base64,AAAA"},
                            }
                        ],
                    }
                ]
            },
        ),
    ],
)
def test_what_does_not_work_yet_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as error:
        convert(**fields)
    assert error.value.param == param
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages", {"messages": None}),
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("n", {"n": True}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**63}),
        ("seed", {"seed": 1.5}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 393217}),
        ("temperature", {"temperature": 2.5}),
        ("temperature", {"temperature": -0.1}),
        ("top_p", {"top_p": 1.5}),
        ("stop", {"stop": ["a", ""]}),
        ("model", {"model": 3}),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": "no"}),
        ("separate_reasoning", {"separate_reasoning": 1}),
        ("skip_special_tokens", {"skip_special_tokens": "no"}),
        ("tools", {"tool_choice": "required"}),
        ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
        ("chat_template_kwargs.thinking", {"chat_template_kwargs": {"thinking": "no"}}),
        (
            "chat_template_kwargs",
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
        ),
        ("reasoning_effort", {"reasoning_effort": ["high"]}),
    ],
)
def test_wrong_values_are_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        convert(**fields)
    assert error.value.param == param
    assert error.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"max_tokens": 2**70},
        {"max_tokens": True},
        {"max_completion_tokens": "many"},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"stop": [str(index) for index in range(17)]},
        {"stop": 3},
        {"stop": ["\ud800"]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "wizard", "content": "a"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": ["hi"]},
        {"messages": [{1: 2}]},
        {"thinking": {"type": "perhaps"}},
        {"thinking": "on"},
        {"reasoning_effort": "gigantic"},
        {"tools": "f"},
        {"tools": [3]},
        {"tools": [{"type": "function"}]},
        {"tools": TOOLS, "tool_choice": "perhaps"},
        {"stream_options": {"include_usage": True}},
        {"stream": "yes"},
    ],
)
@pytest.mark.parametrize("profile", ["open", "deepseek"])
def test_whatever_the_recipe_refuses_is_an_invalid_request(
    profile: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as error:
        convert(profile=profile, **fields)
    assert error.value.status == 400
    assert error.value.message


def test_demanded_call_while_thinking_gets_the_recipes_words_in_the_deepseek_profile() -> None:
    with pytest.raises(InvalidRequest, match="Thinking mode does not support this tool_choice"):
        convert(profile="deepseek", tools=TOOLS, tool_choice="required")


def test_demanded_call_without_thinking_opens_the_calls_block() -> None:
    job = convert(tools=TOOLS, tool_choice="required", **THINKING_OFF)
    assert not job.thinking


def test_unknown_template_default_stops_the_server() -> None:
    with pytest.raises(ConfigError, match="default_chat_template_kwargs"):
        converter(template_kwargs={"thinkin": True})


def test_unexpected_recipe_exception_is_generic_and_logged_by_hash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = body(content="secret prompt")
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(InvalidRequest) as error,
        recipe_errors(secret),
    ):
        raise KeyError("secret prompt in a message of the package")
    assert "secret" not in str(error.value)
    assert "secret" not in caplog.text
    assert "KeyError" in caplog.text
    assert body_hash(secret) in caplog.text


def test_exit_requests_pass_the_guard() -> None:
    with pytest.raises(KeyboardInterrupt), recipe_errors({}):
        raise KeyboardInterrupt
