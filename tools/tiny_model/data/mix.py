"""The mixture: which task how often, and how long."""

from __future__ import annotations

import math
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tools.tiny_model.data import chat, json_tasks, maths, recall, strings, tools_tasks
from tools.tiny_model.data.lexicon import Lexicon, vocabulary_words
from tools.tiny_model.data.talk import talk

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.tiny_model.data.example import Example

_SHORTEST = 45
#: Of the key-value lists, so many are long: recall over many rows is what selection makes hard.
_LONG_SHARE = 0.35
#: Task, share, whether its context fills the row (length drawn log-uniformly up to the row).
SHARES: tuple[tuple[Callable[[Lexicon, int], Example], float, bool], ...] = (
    (recall.key_value, 18, True),
    (recall.needle, 5, True),
    (recall.table, 8, True),
    (recall.copy, 7, True),
    (maths.arithmetic, 8, False),
    (maths.counting, 7, False),
    (maths.date, 4, False),
    (maths.units, 3, False),
    (maths.only_answer, 6, False),
    (strings.strings, 20, False),
    (tools_tasks.tool_call, 10, False),
    (json_tasks.json_answer, 10, True),
    (chat.several_turns, 5, True),
    (talk, 14, True),
    (chat.one_message, 1, False),
    (chat.facts, 3, False),
    (chat.itself, 2, False),
    (chat.client, 4, False),
    (chat.refusal, 4, False),
    (chat.story, 3, False),
    (chat.raw_text, 3, False),
    (chat.chinese, 4, True),
)
#: Rows of the evaluation table: name, generator, budget of the context.
EVALUATION: dict[str, tuple[Callable[[Lexicon, int], Example], int]] = {
    "key-value 256": (recall.key_value, 200),
    "key-value 1K": (recall.key_value, 900),
    "key-value 2K": (recall.key_value, 1600),
    "needle 256": (recall.needle, 200),
    "needle 1K": (recall.needle, 900),
    "needle 2K": (recall.needle, 1650),
    "table": (recall.table, 250),
    "copy": (recall.copy, 100),
    "arithmetic": (maths.arithmetic, 0),
    "counting": (maths.counting, 0),
    "date": (maths.date, 0),
    "units": (maths.units, 0),
    "only-answer": (maths.only_answer, 0),
    "strings": (strings.strings, 0),
    "sort": (strings.sort, 0),
    "unseen copy": (partial(recall.copy, open_only=True), 60),
    "unseen recall": (partial(chat.several_turns, open_only=True), 100),
    "unseen key-value": (partial(recall.key_value, open_only=True), 200),
    "tools known": (partial(tools_tasks.tool_call, known=True), 0),
    "tools unseen": (partial(tools_tasks.tool_call, known=False), 0),
    "json": (json_tasks.json_answer, 120),
    "several turns": (chat.several_turns, 250),
    "talk": (talk, 250),
    "facts": (chat.facts, 0),
    "itself": (chat.itself, 0),
    "client": (chat.client, 0),
    "refusal": (chat.refusal, 0),
    "story": (chat.story, 0),
    "chinese": (chat.chinese, 100),
}


class Mixture:
    """Draws training examples; the stream depends on the seed alone."""

    def __init__(self, seed: int, *, row_length: int) -> None:
        self.lexicon = Lexicon(Random(seed), held_out=False)
        self.row_length = row_length
        self._makers = [entry[0] for entry in SHARES]
        self._weights = [entry[1] for entry in SHARES]
        self._fills = {entry[0]: entry[2] for entry in SHARES}

    def example(self) -> Example:
        """The next example."""
        rng = self.lexicon.rng
        make = rng.choices(self._makers, self._weights)[0]
        budget = _SHORTEST
        if self._fills[make]:
            longest = 0.8 * self.row_length
            budget = int(math.exp(rng.uniform(math.log(_SHORTEST), math.log(longest))))
            if make is recall.key_value and rng.random() < _LONG_SHARE:
                budget = int(rng.uniform(0.3, 1.0) * longest)
        return make(self.lexicon, budget)


def held_out(name: str, seed: int, count: int) -> list[Example]:
    """Evaluation examples of one row of the table; none of their open strings is ever trained on.

    Words of the vocabulary are spelled and sorted in training whatever their split, so the rows of unseen words leave them out.
    """
    make, budget = EVALUATION[name]
    words = vocabulary_words() if name.startswith("unseen") else ()
    excluded = frozenset(word.casefold() for word in words)
    lexicon = Lexicon(Random(f"{name} {seed}"), held_out=True, excluded=excluded)
    return [make(lexicon, budget) for _ in range(count)]
