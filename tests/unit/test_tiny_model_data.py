"""Data of the small trained model: split, arithmetic, rendering, packing."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import numpy as np
import pytest
from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV41Encoding,
    SpecialToken,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hypothesis import given
from hypothesis import strategies as st
from tools.tiny_model.data import maths
from tools.tiny_model.data.example import Call, Example, Turn, ask
from tools.tiny_model.data.lexicon import Lexicon, is_held_out
from tools.tiny_model.data.mix import EVALUATION, SHARES, Mixture, held_out
from tools.tiny_model.packing import ALIGNMENT, pack, stream
from tools.tiny_model.render import Renderer, calls_text

TOKENIZER = Path(__file__).resolve().parents[2] / "tools" / "tiny_model" / "tokenizer.json"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(TOKENIZER)


@pytest.mark.parametrize("make", ["word", "name", "identifier", "code", "special", "chinese"])
def test_open_strings_of_the_two_splits_never_meet(make: str) -> None:
    train, evaluation = (Lexicon(Random(5), held_out=held) for held in (False, True))
    assert not any(is_held_out(getattr(train, make)()) for _ in range(300))
    assert all(is_held_out(getattr(evaluation, make)()) for _ in range(100))


def test_same_seed_gives_the_same_examples() -> None:
    first, second = (Mixture(3, row_length=512) for _ in range(2))
    assert [first.example() for _ in range(60)] == [second.example() for _ in range(60)]


def test_every_task_of_the_mixture_is_drawn() -> None:
    mixture = Mixture(1, row_length=512)
    assert len({mixture.example().task for _ in range(1500)}) >= len(SHARES) - 2


@pytest.mark.parametrize("name", EVALUATION)
def test_every_row_of_the_table_has_examples(name: str) -> None:
    assert all(
        example.turns and (example.answer or example.calls) for example in held_out(name, 0, 5)
    )


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_column_steps_lead_to_the_result(first: int, second: int) -> None:
    columns = maths.add_steps(first, second).split(": ")[1].split()
    digits = "".join(reversed([column[-1] for column in columns]))
    carry = columns[-1].split("=")[1][0]
    assert int(carry + digits) == first + second
    columns = maths.subtract_steps(first, second).split(": ")[1].split()
    digits = "".join(reversed([column.rstrip("b")[-1] for column in columns]))
    assert int(digits) == abs(first - second)


def test_calls_are_written_as_the_recipe_writes_them() -> None:
    arguments = '{"city": "Zürich \\"x\\"", "count": 3, "on": true, "list": [1, "a"], "part": 1.5}'
    messages = [
        UserMessage("hi"),
        AssistantMessage("", tool_calls=[ToolCall("c", "get_it", arguments)]),
        ToolMessage("done", "c"),
    ]
    prompt = (
        DeepseekV41Encoding()
        .render_conversation(Conversation(messages, thinking_mode=False))
        .prompt
    )
    values = {"city": 'Zürich "x"', "count": 3, "on": True, "list": [1, "a"], "part": 1.5}
    assert calls_text([Call("get_it", values)]) in prompt


def test_reply_follows_the_prompt_of_the_server(renderer: Renderer) -> None:
    example = ask("t", "Who are you?", "I am small.", "I know.")
    example.thinking, example.effort, example.system = True, "max", ""
    sample = renderer.sample(example, Random(0))
    text = renderer.tokenizer.decode(sample.ids.tolist(), skip_special_tokens=False)
    assert "Reasoning Effort: 100" in text
    assert "<think>I know.\nCheck: I am small.</think>I am small." in text
    assert sample.ids[-1] == renderer.tokenizer.token_to_id(SpecialToken.Eos.default_str())
    example.effort = "low"
    text = renderer.tokenizer.decode(
        renderer.sample(example, Random(0)).ids.tolist(), skip_special_tokens=False
    )
    assert "<think></think>I am small." in text


def test_several_turns_lose_no_message(renderer: Renderer) -> None:
    turns = [Turn("user", "one"), Turn("assistant", "two"), Turn("user", "three")]
    example = Example("t", turns, "four", thinking=False, system="")
    text = renderer.tokenizer.decode(
        renderer.sample(example, Random(0)).ids.tolist(), skip_special_tokens=False
    )
    assert [text.count(word) for word in ("one", "two", "three", "four")] == [1, 1, 1, 1]


def test_packed_targets_stay_inside_their_sample(renderer: Renderer) -> None:
    mixture, rng = Mixture(2, row_length=512), Random(2)
    samples = [renderer.sample(mixture.example(), rng) for _ in range(80)]
    rows = list(pack(iter(samples), 512))
    assert sum(len(row.spans) for row in rows) == sum(len(sample.ids) <= 512 for sample in samples)
    for row in rows:
        assert (row.start % ALIGNMENT == 0).all()
        weighted = np.flatnonzero(row.weight)
        assert (row.target[weighted] == row.ids[weighted + 1]).all()
        assert (row.start[weighted] == row.start[weighted + 1]).all()
        assert (row.floor >= row.start)[: row.used].all()


def test_rows_of_a_stream_are_well_filled(renderer: Renderer) -> None:
    rows = list(itertools.islice(stream(TOKENIZER, 4, 1024), 12))
    assert np.mean([row.used for row in rows]) > 0.9 * 1024
