"""Ids of prompts and chats from the fast encoder: those of the reference and of the recipe."""

from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsserve import _native
from dsserve.protocol.engine import unpack_u32
from text_helpers import MODEL, TOOLS, codec, converter, tokenizer_path

_SPELLINGS = [
    getattr(recipe.SpecialToken, name).default_str()
    for name in (
        "Bos",
        "Eos",
        "User",
        "Assistant",
        "ThinkingStart",
        "ThinkingEnd",
        "Dsml",
        "System",
    )
]
_texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.sampled_from(_SPELLINGS)
    ),
    min_size=1,
    max_size=5,
).map("".join)
_turns = st.lists(st.tuples(_texts, _texts, _texts), max_size=3)
_encoding = recipe.DeepseekV41Encoding().with_tokenizer(
    recipe.Tokenizer.from_file(str(tokenizer_path() / "tokenizer.json"))
)
_fast = _native.Tokenizer(tokenizer_path(), cache_bytes=1 << 20)
_reference = _native.Tokenizer(tokenizer_path(), backend="huggingface")
_options = recipe.ConversionOptions().with_model_alias(MODEL, recipe.ModelVersion.DeepseekV41Flash)


@given(
    system=st.none() | _texts,
    turns=_turns,
    question=_texts,
    tools=st.booleans(),
    is_thinking=st.booleans(),
)
def test_ids_are_those_of_the_recipes_own_encoder(
    system: str | None,
    turns: list[tuple[str, str, str]],
    question: str,
    tools: bool,
    is_thinking: bool,
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, reasoning, answer in turns:
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": answer, "reasoning_content": reasoning})
    messages.append({"role": "user", "content": question})
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "thinking": {"type": "enabled" if is_thinking else "disabled"},
    }
    if tools:
        body["tools"] = TOOLS
    request = recipe.ChatCompletionRequest(body).convert(_options)
    expected = _encoding.encode(request.conversation)
    # With the fast encoder, its message cache, and with the reference.
    for _ in range(2):
        assert converter().prompt_ids(body) == expected
    rendered = _encoding.render_conversation(request.conversation)
    for tokenizer in (_fast, _reference):
        ids = tokenizer.encode_rendered(rendered.prompt, rendered.special_ranges)
        assert unpack_u32(ids) == expected
    assert codec().decode(expected, skip_special_tokens=False) == rendered.prompt


def test_the_converter_of_these_tests_has_the_fast_encoder() -> None:
    assert _fast.backend == "fastokens"
    assert _reference.backend == "huggingface"


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=6))
def test_texts_get_the_ids_of_the_reference(texts: list[str]) -> None:
    assert _fast.encode_batch(texts) == _reference.encode_batch(texts)
    joined = "".join(texts)
    assert _fast.encode_rendered(joined, []) == _reference.encode_rendered(joined, [])


@pytest.mark.slow
@settings(max_examples=20_000)
@given(texts=st.lists(_texts, min_size=50, max_size=60))
def test_a_million_texts_get_the_ids_of_the_reference(texts: list[str]) -> None:
    assert _fast.encode_batch(texts) == _reference.encode_batch(texts)
