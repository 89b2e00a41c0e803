"""D1 to D4 through the extension: streamed text is whole text under any split of ids and calls."""

from hypothesis import given
from hypothesis import strategies as st

from dsserve.frontend.detokenize import Detokenizer, TextOptions
from dsserve.protocol.engine import FinishCode
from text_helpers import THINKING_OFF, codec, convert, feed, ids_of, merge

_VOCAB_SIZE = 1024
_texts = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("你好世界ひらカナ👩‍👧🇩🇪e\u0301 \n<|think>｜"),  # noqa: RUF001 - on purpose
    ),
    max_size=20,
)
_id_lists = st.lists(
    st.one_of(
        _texts.map(ids_of),
        st.lists(st.integers(0, _VOCAB_SIZE + 8), max_size=4),
        # Single bytes: mostly broken characters.
        st.lists(st.integers(130, 258), max_size=4),
    ),
    max_size=6,
).map(lambda lists: [token for ids in lists for token in ids])
_splits = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def _split(ids: list[int], lengths: list[int]) -> list[list[int]]:
    pieces = []
    start = 0
    while start < len(ids):
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(ids[start : start + length])
        start += length
    return pieces


@given(ids=_id_lists, lengths=_splits, skip=st.booleans())
def test_streamed_text_is_whole_text(ids: list[int], lengths: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(codec().tokenizer)
    handle = detokenizer.open(TextOptions(skip_special_tokens=skip))
    whole = codec().decode(ids, skip_special_tokens=skip)
    text = ""
    for piece in _split(ids, lengths):
        text += detokenizer.push_one(handle, piece).text
        assert whole.startswith(text)
    assert text + detokenizer.finish(handle).text == whole
    raw = b"".join(
        codec().tokenizer.token_bytes(token)
        for token in ids
        if not (skip and token in codec().tokenizer.special_ids)
    )
    assert whole == raw.decode("utf-8", errors="replace")


@given(text=_texts)
def test_encoded_text_decodes_to_itself(text: str) -> None:
    assert codec().decode(ids_of(text), skip_special_tokens=False) == text


@given(
    ids=_id_lists,
    lengths=_splits,
    stops=st.lists(st.text("ab 你\ufffd", min_size=1, max_size=3), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_text_ends_at_the_first_complete_stop_string(
    ids: list[int], lengths: list[int], stops: list[str], include: bool
) -> None:
    detokenizer = Detokenizer(codec().tokenizer)
    handle = detokenizer.open(
        TextOptions(stop=stops, include_stop=include, skip_special_tokens=False)
    )
    deltas = [detokenizer.push_one(handle, piece) for piece in _split(ids, lengths)]
    deltas.append(detokenizer.finish(handle))
    text = "".join(delta.text for delta in deltas)
    whole = codec().decode(ids, skip_special_tokens=False)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert text == whole
        assert deltas[-1].stop is None
        return
    found = max((stop for stop in stops if whole[: min(ends)].endswith(stop)), key=len)
    assert deltas[-1].stop == found
    assert text == whole[: min(ends) - (0 if include else len(found))]


@given(data=st.data(), texts=st.lists(_texts, min_size=1, max_size=5))
def test_streams_in_one_batch_do_not_disturb_each_other(
    data: st.DataObject, texts: list[str]
) -> None:
    detokenizer = Detokenizer(codec().tokenizer)
    handles = [detokenizer.open() for _ in texts]
    left = [ids_of(text) for text in texts]
    out = [""] * len(texts)
    while any(left):
        updates, owners = [], []
        for index in data.draw(st.permutations(range(len(texts)))):
            count = data.draw(st.integers(0, 3)) + (not updates)
            updates.append((handles[index], left[index][:count]))
            owners.append(index)
            left[index] = left[index][count:]
        for index, delta in zip(owners, detokenizer.push(updates), strict=True):
            out[index] += delta.text
    assert [
        text + detokenizer.finish(handle).text for text, handle in zip(out, handles, strict=True)
    ] == [codec().decode(ids_of(text)) for text in texts]


@given(reasoning=_texts, answer=_texts, lengths=_splits)
def test_chat_deltas_are_the_same_under_any_split(
    reasoning: str, answer: str, lengths: list[int]
) -> None:
    job = convert()
    ids = [*ids_of(reasoning), *ids_of("</think>"), *ids_of(answer)]
    one_by_one = merge(feed(job.open_stream(0), ids, FinishCode.LENGTH))
    stream = job.open_stream(0)
    pieces = _split(ids, lengths)
    deltas = []
    for index, piece in enumerate(pieces):
        code = FinishCode.LENGTH if index == len(pieces) - 1 else FinishCode.NONE
        deltas += stream.push(piece, code)
    assert merge(deltas) == one_by_one


@given(ids=_id_lists)
def test_plain_chat_reply_shows_what_decoding_shows(ids: list[int]) -> None:
    # The recipe shows broken characters only when a good one follows, and no line ends before all else.
    stream = convert(skip_special_tokens=False, **THINKING_OFF).open_stream(0)
    content = merge(feed(stream, ids, FinishCode.LENGTH))["content"]
    whole = codec().decode(ids, skip_special_tokens=False).lstrip("\n")
    think_tokens = {codec().token_to_id("<think>"), codec().token_to_id("</think>")}
    if not think_tokens & set(ids):
        assert whole.startswith(content)
        assert set(whole[len(content) :]) <= {"\ufffd"}
