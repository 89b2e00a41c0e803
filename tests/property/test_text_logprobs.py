"""Log-probabilities go out with the text of their ids, under any split, held text and stops."""

from hypothesis import given
from hypothesis import strategies as st

from dsserve.frontend.detokenize import Detokenizer, TextOptions
from dsserve.frontend.logprobs import AlignedLogprob, LogprobAligner, TokenLogprob
from text_helpers import codec, ids_of

_ids = st.lists(
    st.one_of(
        st.text("ab 你好é👩\u200d", max_size=6).map(ids_of),
        st.lists(st.integers(130, 258), max_size=3),
        st.lists(st.integers(0, 1030), max_size=3),
    ),
    max_size=6,
).map(lambda lists: [token for ids in lists for token in ids])


def entry(position: int, token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=-float(position))


@given(
    ids=_ids,
    length=st.integers(1, 5),
    skip=st.booleans(),
    stop=st.lists(st.text("ab 你", min_size=1, max_size=3), max_size=2),
)
def test_entries_go_with_the_text_of_their_ids(
    ids: list[int], length: int, skip: bool, stop: list[str]
) -> None:
    detokenizer = Detokenizer(codec().tokenizer)
    name = detokenizer.open(TextOptions(stop=stop, skip_special_tokens=skip))
    aligner = LogprobAligner(codec().tokenizer, skip_special_tokens=skip)
    text, out = "", list[AlignedLogprob]()
    for start in range(0, len(ids), length):
        part = ids[start : start + length]
        aligner.push([entry(start + i, token_id) for i, token_id in enumerate(part)])
        delta = detokenizer.push_one(name, part)
        text += delta.text
        taken = aligner.take(delta.emitted_tokens)
        out += taken
        # What is out by ids is out as text; a stop cuts text of ids that count.
        if delta.stop is None and taken and taken[-1].data:
            assert taken[-1].text_offset <= len(text)
        assert len(out) == delta.emitted_tokens
    tail = detokenizer.finish(name)
    text += tail.text
    out += aligner.take(tail.emitted_tokens)
    assert [aligned.entry for aligned in out] == [
        entry(position, token_id) for position, token_id in enumerate(ids[: tail.kept_tokens])
    ]
    assert b"".join(aligned.data for aligned in out) == b"".join(
        codec().tokenizer.token_bytes(token_id) for token_id in ids[: tail.kept_tokens]
    )
    whole = codec().decode(ids, skip_special_tokens=skip)
    for aligned in out:
        shown = "" if skip and aligned.entry.token_id in codec().tokenizer.special_ids else None
        if shown is None and "\ufffd" not in aligned.token:
            # A whole token stands where its offset says, but for characters begun before it.
            found = whole[aligned.text_offset :]
            assert found.lstrip("\ufffd").startswith(aligned.token) or aligned.token == ""


def test_held_text_holds_its_entries() -> None:
    detokenizer = Detokenizer(codec().tokenizer)
    name = detokenizer.open(TextOptions(stop=["END"]))
    aligner = LogprobAligner(codec().tokenizer)
    ids = [token_id for c in "aEN" for token_id in ids_of(c)]
    aligner.push([entry(position, token_id) for position, token_id in enumerate(ids)])
    delta = detokenizer.push_one(name, ids)
    assert [aligned.token for aligned in aligner.take(delta.emitted_tokens)] == ["a"]
    assert aligner.take(delta.emitted_tokens) == []
    more = ids_of("!")
    aligner.push([entry(3, more[0])])
    delta = detokenizer.push_one(name, more)
    taken = aligner.take(delta.emitted_tokens)
    assert [(aligned.token, aligned.text_offset) for aligned in taken] == [
        ("E", 1),
        ("N", 2),
        ("!", 3),
    ]


def test_a_part_of_a_character_has_its_bytes() -> None:
    aligner = LogprobAligner(codec().tokenizer)
    ids = ids_of("é")
    assert len(ids) == 2
    aligner.push([entry(position, token_id) for position, token_id in enumerate(ids)])
    first, second = aligner.take(2)
    assert (first.data + second.data).decode() == "é"
    assert (first.token, first.text_offset, second.text_offset) == ("\ufffd", 0, 0)
