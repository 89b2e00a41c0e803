"""The codec and the detokenizer of completions, through the extension."""

import struct
import threading
from pathlib import Path

import pytest

from dsserve import _native
from dsserve.errors import ConfigError, InvalidRequest
from dsserve.frontend.detokenize import MAX_STOP_STRINGS, Detokenizer, TextCodec
from text_helpers import codec, ids_of, tokenizer_path


@pytest.fixture
def detokenizer() -> Detokenizer:
    return Detokenizer(codec().tokenizer)


def test_text_is_cut_before_the_stop_string_and_ids_counted_up_to_it(
    detokenizer: Detokenizer,
) -> None:
    handle = detokenizer.open(stop=["END", "never"])
    before, stop = ids_of("some text "), [i for c in "END" for i in ids_of(c)]
    delta = detokenizer.push_one(handle, [*before, *stop, *ids_of("dropped")])
    assert (delta.text, delta.stop) == ("some text ", "END")
    assert delta.kept_tokens == delta.emitted_tokens == len(before) + len(stop)
    again = detokenizer.push_one(handle, ids_of("more"))
    assert (again.text, again.kept_tokens) == ("", delta.kept_tokens)
    assert detokenizer.finish(handle).text == ""


def test_stop_string_may_stay_in_the_text(detokenizer: Detokenizer) -> None:
    handle = detokenizer.open(stop=["END"], include_stop=True)
    assert detokenizer.push_one(handle, ids_of("a END b")).text == "a END"


def test_held_text_comes_out_when_it_is_no_stop_string(detokenizer: Detokenizer) -> None:
    handle = detokenizer.open(stop=["END"])
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
        detokenizer.open(stop=stop)
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
    handle = decoder.open()
    for handles, offsets, ids in [
        (struct.pack("<Q", handle), struct.pack("<I", 0), b""),
        (struct.pack("<Q", handle), struct.pack("<2I", 0, 2), struct.pack("<I", 5)),
        (struct.pack("<Q", handle + 1), struct.pack("<2I", 0, 1), struct.pack("<I", 5)),
        (b"abc", struct.pack("<I", 0), b""),
        (b"", struct.pack("<I", 0), b"abc"),
    ]:
        with pytest.raises(_native.TokenizerError):
            decoder.push_batch(handles, offsets, ids)
    assert decoder.finish(handle).kept_tokens == 0
    with pytest.raises(_native.TokenizerError):
        decoder.finish(handle)
    with pytest.raises(_native.TokenizerError):
        codec().tokenizer.encode_rendered("abc", [(2, 9)])


def test_threads_may_share_tokenizer_and_decoder() -> None:
    tokenizer = _native.Tokenizer(tokenizer_path(), 2)
    detokenizer = Detokenizer(tokenizer)
    text = "the quick brown fox " * 2000
    ids = codec().encode(text)
    results: list[str] = []

    def work() -> None:
        (packed,) = tokenizer.encode_batch([text])
        handle = detokenizer.open(stop=["never to be found"])
        out = detokenizer.push_one(handle, ids).text + detokenizer.finish(handle).text
        results.append(out if packed == struct.pack(f"<{len(ids)}I", *ids) else "other ids")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [text] * 4
