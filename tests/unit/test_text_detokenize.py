"""The codec and the detokenizer of completions, through the extension."""

import json
import struct
import threading
import time
from itertools import accumulate, chain
from pathlib import Path

import pytest

from dsserve import _native
from dsserve.errors import ConfigError, InvalidRequest
from dsserve.frontend.detokenize import MAX_STOP_STRINGS, Detokenizer, TextCodec, TextOptions
from dsserve.protocol import engine as wire
from dsserve.protocol.engine import FinishCode
from text_helpers import codec, ids_of, tokenizer_path


@pytest.fixture
def detokenizer() -> Detokenizer:
    return Detokenizer(codec().tokenizer)


def test_text_is_cut_before_the_stop_string_and_ids_counted_up_to_it(
    detokenizer: Detokenizer,
) -> None:
    handle = detokenizer.open(TextOptions(stop=["END", "never"]))
    before, stop = ids_of("some text "), [i for c in "END" for i in ids_of(c)]
    delta = detokenizer.push_one(handle, [*before, *stop, *ids_of("dropped")])
    assert (delta.text, delta.stop) == ("some text ", "END")
    assert delta.kept_tokens == delta.emitted_tokens == len(before) + len(stop)
    again = detokenizer.push_one(handle, ids_of("more"))
    assert (again.text, again.kept_tokens) == ("", delta.kept_tokens)
    assert detokenizer.finish(handle).text == ""


def test_stop_string_may_stay_in_the_text(detokenizer: Detokenizer) -> None:
    handle = detokenizer.open(TextOptions(stop=["END"], include_stop=True))
    assert detokenizer.push_one(handle, ids_of("a END b")).text == "a END"


def test_held_text_comes_out_when_it_is_no_stop_string(detokenizer: Detokenizer) -> None:
    handle = detokenizer.open(TextOptions(stop=["END"]))
    held = detokenizer.push_one(handle, [i for c in "aEN" for i in ids_of(c)])
    assert (held.text, held.kept_tokens, held.emitted_tokens) == ("a", 3, 1)
    released = detokenizer.push_one(handle, ids_of("d"))
    assert (released.text, released.emitted_tokens) == ("ENd", 4)


def test_incomplete_character_is_held_and_replaced_once_at_the_end(
    detokenizer: Detokenizer,
) -> None:
    first, *rest = ids_of("é")
    assert rest
    handle = detokenizer.open()
    held = detokenizer.push_one(handle, [*ids_of("a"), first])
    assert (held.text, held.emitted_tokens) == ("a", 1)
    assert detokenizer.finish(handle).text == "\ufffd"
    assert len(detokenizer) == 0


def test_many_streams_go_in_one_call(detokenizer: Detokenizer) -> None:
    texts = [f"text number {index}" for index in range(50)]
    handles = [detokenizer.open() for _ in texts]
    deltas = detokenizer.push(
        [(handle, ids_of(text)) for handle, text in zip(handles, texts, strict=True)]
    )
    assert [delta.text for delta in deltas] == texts
    assert detokenizer.push([]) == []
    for handle in handles:
        detokenizer.close(handle)
        detokenizer.close(handle)
    assert len(detokenizer) == 0


def test_ids_outside_the_vocabulary_give_no_text(detokenizer: Detokenizer) -> None:
    ids = [*ids_of("a"), codec().vocab_size, 2**32 - 1, *ids_of("b")]
    handle = detokenizer.open()
    delta = detokenizer.push_one(handle, ids)
    assert (delta.text, delta.kept_tokens) == ("ab", 4)
    assert codec().decode(ids) == "ab"


@pytest.mark.parametrize("stop", [[""], ["\ud800"], ["x"] * (MAX_STOP_STRINGS + 1), ["x" * 70_000]])
def test_bad_stop_strings_are_refused(detokenizer: Detokenizer, stop: list[str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        detokenizer.open(TextOptions(stop=stop))
    assert error.value.param == "stop"
    assert len(detokenizer) == 0


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5]])
def test_ids_that_are_no_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        codec().decode(ids)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequest) as error:
        codec().encode("a\ud800")
    assert error.value.status == 400


def test_unusable_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextCodec(tmp_path)


def test_batch_is_encoded_as_each_text() -> None:
    texts = ["", "a", "你好 <think>", "x" * 10_000]
    assert codec().encode_batch(texts) == [codec().encode(text) for text in texts]


def test_special_tokens_are_found_by_spelling() -> None:
    assert codec().token_to_id("<think>") in ids_of("<think>")
    assert codec().token_to_id("no such token") is None
    assert {0, 1, 2} <= set(codec().tokenizer.special_ids)


def test_wrong_calls_of_the_extension_are_errors_not_crashes() -> None:
    decoder = _native.StreamDecoder(codec().tokenizer)
    decoder.open(7)
    name = struct.pack("<Q", 7)
    for names, offsets, ids, ends in [
        (name, struct.pack("<I", 0), b"", None),
        (name, struct.pack("<2I", 0, 2), struct.pack("<I", 5), None),
        (name, struct.pack("<2I", 0, 1), struct.pack("<I", 5), b"\0\0"),
        (b"abc", struct.pack("<I", 0), b"", None),
        (b"", struct.pack("<I", 0), b"abc", None),
    ]:
        with pytest.raises(_native.TokenizerError):
            decoder.push_batch(names, offsets, ids, ends)
    with pytest.raises(_native.TokenizerError):
        decoder.open(7)
    unknown = decoder.push_batch(struct.pack("<Q", 8), struct.pack("<2I", 0, 1), b"\5\0\0\0")
    assert (unknown.texts, unknown.kept_tokens) == ([None], [0])
    assert decoder.finish(7).kept_tokens == 0
    with pytest.raises(_native.TokenizerError):
        decoder.finish(7)
    with pytest.raises(_native.TokenizerError):
        codec().tokenizer.encode_rendered("abc", [(2, 9)])
    with pytest.raises(_native.TokenizerError, match="backend"):
        _native.Tokenizer(tokenizer_path(), backend="other")


def test_pushing_to_a_stream_that_is_not_there_is_a_bug_of_the_caller(
    detokenizer: Detokenizer,
) -> None:
    with pytest.raises(KeyError):
        detokenizer.push_one(5, ids_of("a"))


def test_a_step_is_decoded_in_one_call_and_ended_streams_are_forgotten(
    detokenizer: Detokenizer,
) -> None:
    for name in (1, 2, 3):
        detokenizer.open(TextOptions(stop=["END"]), name=name)
    hello, end = ids_of("hello"), [i for c in "aEND" for i in ids_of(c)]
    lists = [hello, end, [*hello, 1], hello]
    codes = [FinishCode.NONE, FinishCode.NONE, FinishCode.STOP_TOKEN, FinishCode.LENGTH]
    deltas = detokenizer.step(outputs([1, 2, 3, 9], lists, codes))
    # Nobody wants text of request 9, a chat say.
    assert {index: delta.text for index, delta in deltas.items()} == {
        0: "hello",
        1: "a",
        2: "hello",
    }
    assert [deltas[index].stop for index in range(3)] == [None, "END", None]
    assert deltas[2].kept_tokens == deltas[2].emitted_tokens == len(hello) + 1
    assert len(detokenizer) == 2


def test_stop_patterns_end_the_text_where_a_match_is_complete(detokenizer: Detokenizer) -> None:
    name = detokenizer.open(TextOptions(stop_regex=["[0-9]+\\.", "x{3}"]))
    deltas = [detokenizer.push_one(name, ids_of(text)) for text in ("a 1", "2", ". b")]
    assert [delta.text for delta in deltas] == ["a ", "", ""]
    assert deltas[-1].stop == "[0-9]+\\."
    kept = detokenizer.open(TextOptions(stop_regex=["[0-9]+\\."], include_stop=True))
    assert detokenizer.push_one(kept, ids_of("a 12. b")).text == "a 12."


@pytest.mark.parametrize(
    "pattern", ["(", "a(?=b)", "a(?!b)", "(?<=a)b", "(a)\\1", "a$", "\\b", "a*", "a" * 1025]
)
def test_patterns_that_cannot_work_in_a_stream_are_refused(
    detokenizer: Detokenizer, pattern: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        detokenizer.open(TextOptions(stop_regex=[pattern]))
    assert error.value.status == 400
    assert error.value.param == "stop_regex"


def test_compiled_options_are_shared_by_streams(detokenizer: Detokenizer) -> None:
    options = TextOptions(stop=["END"], stop_regex=["[0-9]{2}"]).compile()
    names = [detokenizer.open(options) for _ in range(3)]
    texts = ("a END", "b 12", "c")
    updates = [(name, ids_of(text)) for name, text in zip(names, texts, strict=True)]
    deltas = detokenizer.push(updates)
    assert [delta.text for delta in deltas] == ["a ", "b ", "c"]
    assert [delta.stop for delta in deltas] == ["END", "[0-9]{2}", None]


def test_opening_a_stream_with_compiled_options_is_cheap(detokenizer: Detokenizer) -> None:
    stops = [chr(0x1F600 + index) * 1023 + "x" for index in range(16)]
    started_s = time.thread_time()
    options = TextOptions(stop=stops).compile()
    compiled_s = time.thread_time()
    for _ in range(100):
        detokenizer.open(options)
    assert time.thread_time() - compiled_s < compiled_s - started_s


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (TextOptions(stop=["a", "\ud800"], stop_regex=["b"]), "stop"),
        (TextOptions(stop=["a"], stop_regex=["b", "\ud800"]), "stop_regex"),
    ],
)
def test_a_lone_surrogate_is_reported_where_it_is(options: TextOptions, param: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as error:
        options.compile()
    assert error.value.param == param


def test_an_expensive_pattern_is_refused_before_it_is_built() -> None:
    patterns = ["x", *["(?i)[\\p{L}--\\p{Lu}]" * 45] * 15]
    with pytest.raises(InvalidRequest, match=r"stop pattern 1: .*large character classes") as error:
        TextOptions(stop_regex=patterns).compile()
    assert error.value.param == "stop_regex"


def test_ids_are_decoded_one_by_one() -> None:
    ids = [*ids_of("a <think> 你好🎉"), 2**32 - 1, 0] * 700  # more than one part
    expected = [codec().decode([token_id], skip_special_tokens=False) for token_id in ids]
    assert codec().decode_each(ids) == expected
    assert codec().decode_each([]) == []


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one STOP", ["never", "STOP"], "STOP"),
        ("one STOP", ["TOP", "STOP"], "STOP"),
        ("STOP one", ["STOP"], None),
        ("a 🎉", ["🎉"], "🎉"),
        ("🎉🎉", ["a", "🎉🎉"], "🎉🎉"),
        ("a", [], None),
    ],
)
def test_the_stop_string_completed_by_the_last_id(
    text: str, stops: list[str], expected: str | None
) -> None:
    assert codec().completed_stop(stops, ids_of(text)) == expected
    assert codec().completed_stop(stops, []) is None


@pytest.mark.parametrize("backend", ["auto", "huggingface", "fastokens"])
def test_every_backend_gives_the_same_ids(backend: str) -> None:
    other = TextCodec(tokenizer_path(), backend=backend)
    assert other.tokenizer.backend == ("huggingface" if backend == "huggingface" else "fastokens")
    text = "It's 12345 你好世界。 <think>\r\n\n  def f(x): return x_1 👩\u200d👧 é " * 20
    assert other.encode(text) == codec().encode(text)


def test_backend_fastokens_refuses_a_tokenizer_it_does_not_know(tmp_path: Path) -> None:
    file = json.loads((tokenizer_path() / "tokenizer.json").read_text(encoding="utf-8"))
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a-z ]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    with pytest.raises(ConfigError, match="split pattern"):
        TextCodec(tmp_path, backend="fastokens")
    codec_of_auto = TextCodec(tmp_path)
    assert codec_of_auto.tokenizer.backend == "huggingface"
    assert codec_of_auto.tokenizer.fallback_reason is not None
    assert codec_of_auto.decode(codec_of_auto.encode("a b")) == "a b"


def test_messages_seen_before_come_from_the_cache() -> None:
    tokenizer = TextCodec(tokenizer_path()).tokenizer
    messages = [f"message {index} " * 20 for index in range(3)]
    for count in (1, 2, 3):
        tokenizer.encode_batch(["<think>".join(messages[:count])])
    stats = tokenizer.cache_stats()
    assert (stats["entries"], stats["hits"], stats["misses"]) == (3, 1 + 2, 3)
    assert 0 < stats["bytes"] < 64 * 1024


def outputs(
    request_ids: list[int], token_ids: list[list[int]], codes: list[FinishCode]
) -> wire.Outputs:
    """A message of the engine."""
    counts = wire.pack_u32([0] * len(request_ids))
    return wire.Outputs(
        step_id=1,
        request_ids=wire.pack_u64(request_ids),
        token_offsets=wire.pack_u32(accumulate(map(len, token_ids), initial=0)),
        token_ids=wire.pack_u32(chain.from_iterable(token_ids)),
        finish_codes=bytes(codes),
        prompt_lens=counts,
        cached_lens=counts,
        output_lens=counts,
    )


def test_threads_may_share_tokenizer_and_decoder() -> None:
    tokenizer = _native.Tokenizer(tokenizer_path(), 2)
    detokenizer = Detokenizer(tokenizer)
    text = "the quick brown fox " * 2000
    ids = codec().encode(text)
    results: list[str] = []

    def work() -> None:
        (packed,) = tokenizer.encode_batch([text])
        handle = detokenizer.open(TextOptions(stop=["never to be found"]))
        out = detokenizer.push_one(handle, ids).text + detokenizer.finish(handle).text
        results.append(out if packed == struct.pack(f"<{len(ids)}I", *ids) else "other ids")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [text] * 4
