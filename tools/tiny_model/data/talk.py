"""Talks of several different questions: what was said before must neither be lost nor answer the new question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.tiny_model.data import json_tasks, maths, recall, strings, tools_tasks
from tools.tiny_model.data.chat import chinese, client, facts, itself, refusal, remember, story
from tools.tiny_model.data.example import Example, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.tiny_model.data.lexicon import Lexicon

#: What can be asked at any point of a talk, and how often.
_ASKED: tuple[tuple[Callable[[Lexicon, int], Example], float], ...] = (
    (maths.arithmetic, 14),
    (strings.strings, 22),
    (maths.counting, 8),
    (maths.date, 8),
    (maths.units, 5),
    (maths.only_answer, 8),
    (facts, 8),
    (itself, 4),
    (client, 9),
    (refusal, 5),
    (recall.copy, 7),
    (recall.key_value, 7),
    (recall.table, 4),
    (json_tasks.json_answer, 6),
    (story, 2),
    (chinese, 3),
)
_TOKENS_A_TURN = 60
_MOST_TURNS = 5
_SHORT = 60


def talk(lex: Lexicon, budget: int) -> Example:
    """One to five exchanges of any kind, then a question of any kind or about something told before."""
    turns: list[Turn] = []
    told: list[tuple[str, str, str]] = []
    for _ in range(lex.rng.randint(1, max(1, min(_MOST_TURNS, budget // _TOKENS_A_TURN)))):
        if lex.chance(0.2):
            fact = remember(lex)
            told = [entry for entry in told if entry[0] != fact.question]
            told.append((fact.question, fact.answer, fact.tell))
            turns += [Turn("user", fact.tell), Turn("assistant", fact.reply)]
        else:
            turns += _exchange(lex)
    if told and lex.chance(0.3):
        question, answer, said = lex.rng.choice(told)
        turns.append(Turn("user", question))
        return Example("talk", turns, answer, f"The user said: {said}")
    if lex.chance(0.06):
        fact = remember(lex)
        turns.append(Turn("user", fact.tell))
        return Example("talk", turns, fact.reply, "The user tells me something.")
    last = _single(lex) if lex.chance(0.94) else tools_tasks.tool_call(lex, 0)
    last.turns = [*turns, *last.turns]
    last.task = "talk"
    return last


def _single(lex: Lexicon) -> Example:
    """A question of one turn."""
    makers, weights = zip(*_ASKED, strict=True)
    while True:
        example: Example = lex.rng.choices(makers, weights)[0](lex, _SHORT)
        if len(example.turns) == 1:
            return example


def _exchange(lex: Lexicon) -> list[Turn]:
    """A question and its reply as the talk keeps it."""
    while True:
        example = _single(lex)
        if example.response is None:
            break
    steps = example.reason if example.needs_reason else ""
    return [*example.turns, Turn("assistant", example.answer, steps=steps)]
