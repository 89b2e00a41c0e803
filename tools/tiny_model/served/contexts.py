"""Variants of key-value cases: the same context with another question, and with the longest reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tools.tiny_model.render import Settings
from tools.tiny_model.served.pressure import Pressed

if TYPE_CHECKING:
    from tools.tiny_model.render import Renderer
    from tools.tiny_model.served.cases import Case

_SEPARATORS = (": ", " = ", " -> ")
_REPLY_MORE = 16


def hit_chain(case: Case) -> list[dict[str, Any]] | None:
    """Two requests: another question about the context, whose answer does not matter, and the case's own.

    Returns:
        None if the question stands before the context, so that two questions share no prefix.
    """
    context, _, question = case.example.turns[0].content.rpartition("\n\n")
    if "\n" in question or "\n" not in context:
        return None
    key = next(key for key in _keys(context) if key not in question)
    salt = {"cache_salt": f"{case.name} {case.index}"}
    other = replace(
        case.example,
        turns=[replace(case.example.turns[0], content=f"{context}\n\nWhat is the value of {key}?")],
    )
    first = replace(case, example=other, max_tokens=1)
    return [first.body() | salt, case.body() | salt]


def longest_reply(case: Case, renderer: Renderer) -> tuple[Case, Pressed]:
    """The case with thinking and the highest effort, whose reply takes the most tokens."""
    settings = Settings(True, "max", case.settings.system)
    sample = renderer.render(case.example, settings)
    reply_len = len(sample.ids) - sample.prompt_len
    longer = replace(case, settings=settings, max_tokens=reply_len + _REPLY_MORE)
    return longer, Pressed(longer.body(), sample.prompt_len)


def _keys(context: str) -> list[str]:
    lines = context.split("\n")
    separator = next(each for each in _SEPARATORS if all(each in line for line in lines))
    return [line.split(separator, 1)[0] for line in lines]
