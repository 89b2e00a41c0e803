"""Generated ids to deltas: reasoning, tool calls, stop strings, ends, counts."""

import json

import pytest

from dsserve.protocol.engine import FinishCode
from text_helpers import (
    DSML,
    EOS_ID,
    THINKING_OFF,
    TOOLS,
    calls_block,
    convert,
    feed,
    ids_of,
    merge,
    reply,
)

CALL = {"name": "f", "arguments": '{"x": "val ue"}'}


@pytest.mark.parametrize("piece_len", [1, 3, 1000])
def test_reasoning_and_answer_are_told_apart(piece_len: int) -> None:
    text = "I think</think>The answer"
    message, stream = reply(convert(), text, piece_len=piece_len)
    assert message == {"content": "The answer", "reasoning_content": "I think", "tool_calls": []}
    assert stream.finish_reason == "stop"
    assert stream.kept_tokens == len(ids_of(text)) + 1
    assert stream.reasoning_tokens == len(ids_of("I think"))


def test_without_thinking_all_text_is_answer() -> None:
    message, stream = reply(convert(**THINKING_OFF), "plain")
    assert (message["content"], message["reasoning_content"]) == ("plain", "")
    assert stream.reasoning_tokens == 0


def test_text_that_spells_the_end_of_thinking_does_not_end_it() -> None:
    stream = convert().open_stream(0)
    ids = [token for character in "</think>a" for token in ids_of(character)]
    assert merge(feed(stream, ids, FinishCode.LENGTH))["reasoning_content"] == "</think>a"


def test_length_ends_a_stream_anywhere() -> None:
    message, stream = reply(convert(), "only thoughts", FinishCode.LENGTH)
    assert (message["reasoning_content"], message["content"]) == ("only thoughts", "")
    assert stream.finish_reason == "length"
    assert stream.kept_tokens == stream.reasoning_tokens == len(ids_of("only thoughts"))


def test_stop_token_is_counted_and_not_shown() -> None:
    stream = convert(**THINKING_OFF).open_stream(0)
    deltas = stream.push([*ids_of("ab"), EOS_ID], FinishCode.STOP_TOKEN)
    assert deltas == [{"content": "ab"}]
    assert stream.kept_tokens == len(ids_of("ab")) + 1
    assert stream.finished


def test_ids_after_the_end_are_dropped_and_not_counted() -> None:
    _, stream = reply(convert(), "a</think>b")
    kept = stream.kept_tokens
    assert stream.push(ids_of("more"), FinishCode.LENGTH) == []
    assert (stream.kept_tokens, stream.finish_reason) == (kept, "stop")


def test_continued_answer_starts_as_content() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "The ans", "prefix": True},
    ]
    message, _ = reply(convert(messages=messages), "wer")
    assert (message["content"], message["reasoning_content"]) == ("wer", "")


# tools


def test_calls_are_parsed_after_an_answer() -> None:
    text = "th</think>hello\n\n" + calls_block(("f", "val ue"), ("g", "2")) + "dropped"
    message, stream = reply(convert(tools=TOOLS), text)
    assert message["content"] == "hello"
    assert message["tool_calls"] == [CALL, {"name": "g", "arguments": '{"x": "2"}'}]
    assert stream.finish_reason == "tool_calls"
    assert stream.kept_tokens == len(ids_of(text)) + 1


def test_arguments_stream_as_pieces_of_json() -> None:
    stream = convert(tools=TOOLS).open_stream(0)
    text = "</think>" + calls_block(("f", "some value"))
    pieces = [
        call
        for token_id in ids_of(text)
        for delta in stream.push([token_id])
        for call in delta["tool_calls"]
    ]
    assert pieces[0]["function"] == {"name": "f", "arguments": ""}
    assert pieces[0]["id"].startswith("call_")
    assert len(pieces) > 4
    assert all("id" not in piece for piece in pieces[1:])
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert json.loads(arguments) == {"x": "some value"}


def test_calls_opened_while_thinking_end_thinking() -> None:
    message, stream = reply(convert(tools=TOOLS), "th" + calls_block(("f", "val ue")) + "dropped")
    assert message == {"content": "", "reasoning_content": "th", "tool_calls": [CALL]}
    assert stream.finish_reason == "tool_calls"
    assert 0 < stream.reasoning_tokens <= len(ids_of("th")) + 1


def test_call_cut_by_length_is_reported_as_it_stands() -> None:
    text = "</think>" + calls_block(("f", "val ue"))
    cut = text[: text.index("ue<")]
    message, stream = reply(convert(tools=TOOLS), cut, FinishCode.LENGTH)
    assert message["tool_calls"] == [{"name": "f", "arguments": '{"x": "val '}]
    assert message["content"] == ""
    assert stream.finish_reason == "length"


def test_unknown_tool_names_are_passed_through() -> None:
    message, _ = reply(convert(tools=TOOLS), "</think>" + calls_block(("unknown", "1")))
    assert message["tool_calls"][0]["name"] == "unknown"


def test_markup_spelled_in_plain_text_is_no_call() -> None:
    stream = convert(tools=TOOLS, **THINKING_OFF).open_stream(0)
    text = calls_block(("f", "1"))
    ids = [token for character in text for token in ids_of(character)]
    message = merge(feed(stream, ids, FinishCode.LENGTH))
    assert message["tool_calls"] == []
    assert message["content"].startswith(f"<{DSML} calls>")


def test_with_tool_choice_none_calls_are_dropped_and_tools_not_rendered() -> None:
    job = convert(tools=TOOLS, tool_choice="none")
    assert job.prompt_ids == convert().prompt_ids
    message, stream = reply(job, "th</think>hello" + calls_block(("f", "1")))
    assert message == {"content": "hello", "reasoning_content": "th", "tool_calls": []}
    assert stream.finish_reason == "stop"


def test_without_tools_the_markup_is_content() -> None:
    message, stream = reply(convert(), "</think>" + calls_block(("f", "1")))
    assert f"<{DSML} calls>" in message["content"]
    assert stream.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_demanded_call_is_parsed_inside_the_block_that_the_prompt_opened(choice: object) -> None:
    job = convert(tools=TOOLS, tool_choice=choice, **THINKING_OFF)
    assert job.prompt_ids[-len(ids_of(f"<{DSML} calls>\n")) :] == ids_of(f"<{DSML} calls>\n")
    message, stream = reply(job, calls_block(("f", "val ue"), is_open=True))
    assert message["tool_calls"] == [CALL]
    assert stream.finish_reason == "tool_calls"


def test_without_parallel_calls_the_reply_ends_before_the_second() -> None:
    job = convert(tools=TOOLS, parallel_tool_calls=False)
    text = "</think>" + calls_block(("f", "val ue"), ("g", "2"))
    message, stream = reply(job, text)
    assert message["tool_calls"] == [CALL]
    assert (stream.finished, stream.finish_reason) == (True, "tool_calls")
    assert stream.kept_tokens < len(ids_of(text))
    assert stream.push(ids_of("x"), FinishCode.LENGTH) == []
    single, _ = reply(job, "</think>" + calls_block(("f", "val ue")))
    assert single["tool_calls"] == [CALL]


# stop strings, special tokens, forms of reasoning


def test_stop_strings_act_on_the_answer_only() -> None:
    job = convert(stop=["zz", "stop"])
    text = "azzb</think>xz stop"
    message, stream = reply(job, text + " never seen")
    assert (message["reasoning_content"], message["content"]) == ("azzb", "xz ")
    assert (stream.finished, stream.finish_reason) == (True, "stop")
    assert stream.kept_tokens == len(ids_of(text))


def test_held_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    message, stream = reply(convert(stop=["zzz"], **THINKING_OFF), "azz", FinishCode.LENGTH)
    assert message["content"] == "azz"
    assert stream.finish_reason == "length"


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    pad = 2
    ids = [*ids_of("a"), pad, *ids_of("b")]
    skipping = convert(**THINKING_OFF).open_stream(0)
    assert merge(feed(skipping, ids, FinishCode.LENGTH))["content"] == "ab"
    assert skipping.kept_tokens == 3
    keeping = convert(skip_special_tokens=False, **THINKING_OFF).open_stream(0)
    content = merge(feed(keeping, ids, FinishCode.LENGTH))["content"]
    assert len(content) > 2
    assert (content[0], content[-1]) == ("a", "b")


def test_reasoning_may_come_as_one_piece_when_complete() -> None:
    stream = convert(stream_reasoning=False).open_stream(0)
    assert feed(stream, ids_of("long thoughts"), FinishCode.NONE) == []
    deltas = feed(stream, [*ids_of("</think>answer"), EOS_ID], FinishCode.STOP_TOKEN)
    assert deltas[0] == {"reasoning_content": "long thoughts"}
    assert merge(deltas)["content"] == "answer"


def test_held_reasoning_comes_out_when_length_ends_it() -> None:
    message, _ = reply(convert(stream_reasoning=False), "thoughts", FinishCode.LENGTH)
    assert message["reasoning_content"] == "thoughts"


def test_reasoning_may_be_part_of_the_content() -> None:
    message, stream = reply(convert(separate_reasoning=False), "th</think>answer")
    assert message["content"] == "<think>th</think>answer"
    assert message["reasoning_content"] == ""
    assert stream.reasoning_tokens == len(ids_of("th"))


def test_broken_characters_do_not_raise_the_reasoning_count() -> None:
    (first, *_), stream = ids_of("é"), convert().open_stream(0)
    feed(stream, [first, *ids_of("a")], FinishCode.LENGTH)
    assert stream.reasoning_tokens <= stream.kept_tokens == 2


def test_choices_have_streams_of_their_own() -> None:
    job = convert(n=2)
    first, second = job.open_stream(0), job.open_stream(1)
    mixed: list[tuple[int, dict[str, object]]] = []
    for one, other in zip(ids_of("ab</think>cd"), ids_of("ef</think>gh"), strict=False):
        mixed += [(0, delta) for delta in first.push([one])]
        mixed += [(1, delta) for delta in second.push([other])]
    first.push([EOS_ID], FinishCode.STOP_TOKEN)
    second.push([EOS_ID], FinishCode.LENGTH)
    assert (first.index, second.index) == (0, 1)
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert merge([delta for index, delta in mixed if index == 0])["reasoning_content"] == "ab"
    assert merge([delta for index, delta in mixed if index == 1])["reasoning_content"] == "ef"


def test_closed_stream_gives_nothing_more() -> None:
    stream = convert().open_stream(0)
    stream.push(ids_of("a"))
    stream.close()
    assert stream.finished
    assert stream.push(ids_of("b"), FinishCode.LENGTH) == []
    assert stream.finish_reason is None
    stream.close()
