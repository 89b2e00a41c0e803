"""An example as token ids: the prompt as the server renders it, the reply as the model is to write it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV41Encoding,
    Message,
    SpecialToken,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from deepseek_recipe import Tokenizer as RecipeTokenizer
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from numpy.typing import NDArray
    from tools.tiny_model.data.example import Call, Example, Turn

SYSTEM_TEXTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are dsserve-tiny, a very small language model.",
    "Answer briefly.", "You are a friendly assistant. Answer the question of the user.", "Be precise.",
    "You are an assistant that helps people find information.", "You are a helpful AI assistant.",
)  # fmt: skip
_SYSTEM_SHARE = 0.2
_THINKING_SHARE = 0.45
#: None renders as `high`.
_EFFORTS = (None, None, None, "low", "high", "max")
_DSML, _THINK_END, _EOS, _BOS = (
    token.default_str()
    for token in (SpecialToken.Dsml, SpecialToken.ThinkingEnd, SpecialToken.Eos, SpecialToken.Bos)
)
#: Loss weights of prompt tokens and of raw text.
PROMPT_WEIGHT, RAW_WEIGHT = 0.05, 0.3


@dataclass(frozen=True, slots=True)
class Sample:
    """One rendered example.

    Attributes:
        task: Its task.
        ids: All token ids, the prompt's first.
        prompt_len: Tokens of the prompt.
        prompt_weight: Loss weight of prompt tokens.
    """

    task: str
    ids: NDArray[np.int32]
    prompt_len: int
    prompt_weight: float = PROMPT_WEIGHT


@dataclass(frozen=True, slots=True)
class Settings:
    """What an example leaves open, drawn.

    Attributes:
        thinking: Whether the reply starts with reasoning.
        effort: Effort of the reasoning; None renders as `high`.
        system: System text; empty = none.
    """

    thinking: bool
    effort: str | None
    system: str


def settle(example: Example, rng: Random) -> Settings:
    """Draw what the example leaves open."""
    thinking = rng.random() < _THINKING_SHARE if example.thinking is None else example.thinking
    effort = rng.choice(_EFFORTS) if example.effort is None else example.effort
    return Settings(thinking, effort, draw_system(example, rng))


def draw_system(example: Example, rng: Random) -> str:
    """The system text of an example, empty for none."""
    system = example.system
    if system is None and rng.random() < _SYSTEM_SHARE:
        system = rng.choice(SYSTEM_TEXTS)
    return system or ""


def calls_text(calls: list[Call]) -> str:
    """Tool calls in DSML, as the recipe renders them."""
    lines = [f"\n\n<{_DSML} calls>"]
    for call in calls:
        lines.append(f'<{_DSML} invoke name="{call.name}">')
        for name, value in call.arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            flag = "true" if is_text else "false"
            lines.append(
                f'<{_DSML} parameter name="{name}" string="{flag}">{shown}</{_DSML} parameter>'
            )
        lines.append(f"</{_DSML} invoke>")
    lines.append(f"</{_DSML} calls>")
    return "\n".join(lines)


def reply_text(example: Example, *, thinking: bool, effort: str | None) -> str:
    """What the assistant writes behind the prompt, up to the end token."""
    text = example.answer + (calls_text(example.calls) if example.calls else "")
    if thinking:
        reason = example.reason
        if effort == "low":
            reason = example.reason if example.needs_reason else ""
        elif effort == "max":
            reason += (
                "\nCheck: "
                + (example.answer.rstrip(".") if 0 < len(example.answer) <= 40 else "done")
                + "."
            )
        return f"{reason}{_THINK_END}{text}{_EOS}"
    if example.needs_reason:
        text = f"{example.reason}\n{text}"
    return text + _EOS


class Renderer:
    """Renders examples with one tokenizer."""

    def __init__(self, tokenizer_file: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._encoding = DeepseekV41Encoding().with_tokenizer(
            RecipeTokenizer.from_file(str(tokenizer_file))
        )

    def sample(self, example: Example, rng: Random) -> Sample:
        """Render; `rng` draws what the example leaves open (thinking, effort, system text)."""
        if example.raw is not None:
            ids = self._ids(_BOS + example.raw + _EOS)
            return Sample(example.task, np.array(ids, dtype=np.int32), 1, RAW_WEIGHT)
        return self.render(example, settle(example, rng))

    def render(self, example: Example, settings: Settings) -> Sample:
        """Render an example that has messages."""
        prompt = self._encoding.encode(self.conversation(example, settings))
        reply = self._ids(reply_text(example, thinking=settings.thinking, effort=settings.effort))
        return Sample(example.task, np.array([*prompt, *reply], dtype=np.int32), len(prompt))

    @staticmethod
    def conversation(example: Example, settings: Settings) -> Conversation:
        """The conversation of an example in the recipe's terms."""
        messages: list[Message] = [SystemMessage(settings.system)] if settings.system else []
        messages += [
            _message(turn, index, thinking=settings.thinking)
            for index, turn in enumerate(example.turns)
        ]
        response: dict[str, Any] = {}
        if isinstance(example.response, dict):
            response["response_schema"] = example.response
        elif example.response == "json_object":
            response["response_format"] = "json_object"
        return Conversation(
            messages,
            thinking_mode=settings.thinking,
            tools=[ToolDefinition(t.name, t.description, t.parameters) for t in example.tools]
            or None,
            reasoning_effort=settings.effort if settings.thinking else None,  # type: ignore[arg-type]
            **response,
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _message(turn: Turn, index: int, *, thinking: bool) -> Message:
    if turn.role == "user":
        return UserMessage(turn.content)
    if turn.role == "tool":
        return ToolMessage(turn.content, f"call_{index - 1}")
    calls = [
        ToolCall(f"call_{index}", call.name, json.dumps(call.arguments, ensure_ascii=False))
        for call in turn.calls
    ]
    content = f"{turn.steps}\n{turn.content}" if turn.steps and not thinking else turn.content
    return AssistantMessage(content, reasoning_content=turn.reasoning, tool_calls=calls or None)
