"""Prompt ids of chats: stable, and the same from the recipe's encoder and from ours."""

from typing import Any

import deepseek_recipe as recipe
from hypothesis import given
from hypothesis import strategies as st

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
_options = recipe.ConversionOptions().with_model_alias(MODEL, recipe.ModelVersion.DeepseekV41Flash)


@given(
    system=st.none() | _texts,
    turns=_turns,
    question=_texts,
    tools=st.booleans(),
    is_thinking=st.booleans(),
)
def test_recipe_and_segment_encoding_give_the_same_ids(
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
    ids = converter().prompt_ids(body)
    assert converter().prompt_ids(body) == ids
    request = recipe.ChatCompletionRequest(body).convert(_options)
    rendered = _encoding.render_conversation(request.conversation)
    ours = codec().tokenizer.encode_rendered(rendered.prompt, rendered.special_ranges)
    assert unpack_u32(ours) == ids
    assert codec().decode(ids, skip_special_tokens=False) == rendered.prompt
