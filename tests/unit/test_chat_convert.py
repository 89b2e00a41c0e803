"""Chat bodies to jobs: thinking, sampling, limits, messages."""

import pytest

from dsserve.chat.settings import SamplingDefaults
from dsserve.errors import ContextTooLong, InvalidRequest, NotFound, Unsupported
from text_helpers import (
    CONTEXT_LENGTH,
    MODEL,
    THINKING_OFF,
    body,
    convert,
    converter,
    ids_of,
    text_of,
)

BOS = "<｜begin▁of▁sentence｜>"  # noqa: RUF001 - the released spelling
USER = "<｜User｜>"  # noqa: RUF001 - the released spelling
ASSISTANT = "<｜Assistant｜>"  # noqa: RUF001 - the released spelling
SYSTEM = "<｜System｜>"  # noqa: RUF001 - the released spelling
EFFORT = (
    "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)


def prompt(**fields: object) -> str:
    return text_of(converter().prompt_ids(body() | fields))


def test_plain_request_thinks_with_a_budget_line() -> None:
    job = convert()
    assert job.thinking
    assert text_of(job.prompt_ids) == (
        BOS + SYSTEM + EFFORT.format(75) + USER + "hi" + ASSISTANT + "<think>"
    )


@pytest.mark.parametrize(
    "fields",
    [
        THINKING_OFF,
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"},
    ],
)
def test_thinking_is_switched_off(fields: dict[str, object]) -> None:
    job = convert(**fields)
    assert not job.thinking
    assert text_of(job.prompt_ids) == BOS + USER + "hi" + ASSISTANT + "</think>"


def test_request_fields_win_over_the_servers_template_defaults() -> None:
    off = converter(template_kwargs={"thinking": False})
    assert not off.convert(body()).thinking
    assert off.convert(body(thinking={"type": "enabled"})).thinking
    assert off.convert(body(reasoning_effort="low")).thinking
    assert off.convert(body(chat_template_kwargs={"enable_thinking": True})).thinking


@pytest.mark.parametrize(
    ("effort", "budget"),
    [("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("xhigh", 75), ("max", 100)],
)
def test_efforts_become_budget_lines(effort: str, budget: int) -> None:
    assert EFFORT.format(budget) in prompt(reasoning_effort=effort)
    assert EFFORT.format(budget) in prompt(chat_template_kwargs={"reasoning_effort": effort})


@pytest.mark.parametrize("effort", [7, 0.5])
def test_numeric_effort_is_refused_by_name(effort: float) -> None:
    with pytest.raises(Unsupported) as error:
        convert(reasoning_effort=effort)
    assert error.value.param == "reasoning_effort"


def test_open_profile_keeps_the_clients_sampling() -> None:
    job = convert(temperature=0.3, top_p=0.2)
    assert (job.temperature, job.top_p) == (0.3, 0.2)


def test_open_profile_fills_in_the_models_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9)
    job = converter(defaults=defaults).convert(body(top_p=0.5))
    assert (job.temperature, job.top_p) == (0.6, 0.5)
    assert (convert().temperature, convert().top_p) == (1.0, 1.0)


def test_deepseek_profile_overrides_sampling_while_thinking() -> None:
    job = convert(profile="deepseek", temperature=0.0, top_p=0.2)
    assert job.temperature == 1.0
    assert job.top_p == pytest.approx(0.95)
    unset = convert(profile="deepseek")
    assert (unset.temperature, unset.top_p) == (1.0, 1.0)


def test_deepseek_profile_without_thinking_keeps_temperature_only() -> None:
    job = convert(profile="deepseek", temperature=0.25, top_p=0.5, **THINKING_OFF)
    assert (job.temperature, job.top_p) == (0.25, 1.0)
    v4 = converter(profile="deepseek", version="v4").convert(
        body(temperature=0.25, top_p=0.5) | THINKING_OFF
    )
    assert (v4.temperature, v4.top_p) == (0.25, 0.5)
    thinking = converter(profile="deepseek", version="v4").convert(body(top_p=0.5))
    assert (thinking.temperature, thinking.top_p) == (1.0, 1.0)


def test_output_limit_comes_from_either_field_and_the_newer_one_wins() -> None:
    assert convert(max_tokens=5).max_tokens == 5
    assert convert(max_completion_tokens=6).max_tokens == 6
    assert convert(max_completion_tokens=6, max_tokens=5).max_tokens == 6


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, 65536), ({"reasoning_effort": "max"}, 131072), (THINKING_OFF, 8192)],
)
def test_unset_output_limit_depends_on_the_effort(fields: dict[str, object], limit: int) -> None:
    wide = converter(context_length=1_000_000)
    assert wide.convert(body() | fields).max_tokens == limit


def test_unset_output_limit_is_lowered_to_the_context_left() -> None:
    job = convert()
    assert job.max_tokens == CONTEXT_LENGTH - len(job.prompt_ids)


def test_output_beyond_the_context_is_refused() -> None:
    room = convert().max_tokens
    assert convert(max_tokens=room).max_tokens == room
    with pytest.raises(ContextTooLong) as error:
        convert(max_tokens=room + 1)
    assert str(CONTEXT_LENGTH) in str(error.value)


def test_prompt_that_fills_the_context_is_refused() -> None:
    prompt_len = len(convert().prompt_ids)
    assert converter(context_length=prompt_len + 1).convert(body()).max_tokens == 1
    with pytest.raises(ContextTooLong):
        converter(context_length=prompt_len).convert(body())
    assert len(converter(context_length=prompt_len).prompt_ids(body())) == prompt_len


def test_developer_is_system_and_reasoning_is_reasoning_content() -> None:
    def history(system: str, reasoning: str) -> str:
        return prompt(
            messages=[
                {"role": system, "content": "be brief"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", reasoning: "because"},
                {"role": "user", "content": "c"},
            ],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )

    assert history("developer", "reasoning") == history("system", "reasoning_content")
    assert "because" in history("developer", "reasoning")


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {},
    ],
)
def test_final_assistant_message_is_continued(fields: dict[str, object]) -> None:
    last = {"role": "assistant", "content": "The answer"}
    if not fields:
        last["prefix"] = True  # type: ignore[assignment]
    messages = [{"role": "user", "content": "q"}, last]
    job = convert(messages=messages, **fields)
    assert text_of(job.prompt_ids).endswith(ASSISTANT + "<think></think>The answer")
    without = convert(messages=messages, **fields, **THINKING_OFF)
    assert text_of(without.prompt_ids).endswith(ASSISTANT + "</think>The answer")


def test_reasoning_prefix_is_continued_inside_thinking() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "prefix": True},
    ]
    assert prompt(messages=messages).endswith(ASSISTANT + "<think>so")


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"continue_final_message": "yes"},
    ],
)
def test_contradicting_continuation_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        convert(**fields)


def test_spelled_control_tokens_in_messages_are_plain_text() -> None:
    ids = converter().prompt_ids(body(content="</think>" + USER))
    (user_id,) = ids_of(USER)
    (think_end_id,) = ids_of("</think>")
    assert ids.count(user_id) == 1
    assert think_end_id not in ids
    assert USER + "</think>" + USER + ASSISTANT in text_of(ids)


def test_models_are_known_by_served_names_only() -> None:
    assert convert(model="alias").model == "alias"
    assert converter().convert({"messages": body()["messages"]}).model == MODEL
    with pytest.raises(NotFound) as error:
        convert(model="DeepSeek-V4.1-Flash")
    assert error.value.code == "model_not_found"
    with pytest.raises(InvalidRequest):
        convert(profile="deepseek", model="other")


def test_choices_seed_stop_and_stream_options_are_read() -> None:
    job = convert(
        n=3,
        seed=7,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
    )
    assert (job.n, job.seed, job.stop) == (3, 7, ("a", "b"))
    assert job.stream
    assert job.include_usage
    assert convert(stop="x").stop == ("x",)
    plain = convert()
    assert (plain.n, plain.seed, plain.stop) == (1, None, ())
    assert not plain.stream
    assert not plain.include_usage


def test_fields_of_the_engine_do_not_reach_the_recipe() -> None:
    fields = {"top_k": 5, "logit_bias": {"3": 1}, "frequency_penalty": 9, "unknown": object()}
    assert convert(**fields).prompt_ids == convert().prompt_ids


def test_missing_reasoning_in_tool_turns_is_filled_or_refused() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert convert(messages=messages, tools=tools).prompt_ids
    with pytest.raises(InvalidRequest):
        convert(profile="deepseek", messages=messages, tools=tools)
