"""A held-out example as a chat request, and whether a reply to it is right."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from tools.tiny_model.data.mix import held_out
from tools.tiny_model.render import settle
from tools.tiny_model.scoring import EVAL_SEED, MAX_LENGTH

if TYPE_CHECKING:
    from tools.tiny_model.data.example import Call, Example, Turn
    from tools.tiny_model.render import Renderer, Settings

#: Room for a reply: so many times the tokens of the reference, and so many more.
_BUDGET_FACTOR, _BUDGET_MORE = 2, 48


@dataclass(slots=True)
class Reply:
    """What the server answered.

    Attributes:
        content: Text of the answer.
        reasoning: Text of the reasoning; empty without one.
        calls: Name and arguments (as the JSON text that came) of every tool call.
        finish_reason: Why it ended.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Of these, how many were not computed.
        reasoning_tokens: Tokens of the reasoning.
        completion_tokens: Tokens of the reply.
    """

    content: str
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One request and what is expected.

    Attributes:
        name: Row of `EVALUATION`.
        index: Number of the example in its row.
        example: The example.
        settings: Thinking, effort and system text.
        max_tokens: Budget of the reply.
    """

    name: str
    index: int
    example: Example
    settings: Settings
    max_tokens: int

    def body(self) -> dict[str, Any]:
        """The chat request, greedy, without a model name."""
        system = self.settings.system
        messages = [{"role": "system", "content": system}] if system else []
        messages += [
            _message(turn, index, thinking=self.settings.thinking)
            for index, turn in enumerate(self.example.turns)
        ]
        body: dict[str, Any] = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "thinking": {"type": "enabled" if self.settings.thinking else "disabled"},
        }
        if self.settings.thinking and self.settings.effort is not None:
            body["reasoning_effort"] = self.settings.effort
        if self.example.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters,
                    },
                }
                for tool in self.example.tools
            ]
        return body

    def expected(self) -> str:
        """The answer in one text, to show."""
        return _show_calls(self.example.calls) if self.example.calls else self.example.answer

    def is_right(self, reply: Reply) -> bool:
        """Whether the final answer is exactly the expected one."""
        if self.example.calls or reply.calls:
            return _same_calls(self.example.calls, reply.calls)
        if self.name == "json":
            return _same_json(self.example.answer, reply.content)
        return self._final(reply.content) == self.example.answer

    def is_formatted(self, reply: Reply) -> bool:
        """Whether reasoning is there and closed with thinking, and absent without.

        Low effort may leave it out.
        """
        if not self.settings.thinking:
            return not reply.reasoning
        is_closed = bool(reply.content or reply.calls)
        return is_closed and (bool(reply.reasoning) or self.settings.effort == "low")

    def _final(self, content: str) -> str:
        """The last line where the steps stand before the answer."""
        shows_steps = self.example.needs_reason and not self.settings.thinking
        return content.rsplit("\n", 1)[-1] if shows_steps else content


def build_cases(renderer: Renderer, name: str, count: int, seed: int = EVAL_SEED) -> list[Case]:
    """Held-out examples; with the default seed those that the trainer scores, with the same draws."""
    rng = Random(f"render {name} {seed}")
    cases: list[Case] = []
    for example in held_out(name, seed, count):
        settings = settle(example, rng)
        sample = renderer.render(example, settings)
        if len(sample.ids) <= MAX_LENGTH:
            reply_len = len(sample.ids) - sample.prompt_len
            budget = _BUDGET_FACTOR * reply_len + _BUDGET_MORE
            cases.append(Case(name, len(cases), example, settings, budget))
    return cases


def has_ended(reply: Reply) -> bool:
    """Whether the reply ended by itself within its budget."""
    return reply.finish_reason in ("stop", "tool_calls")


def parses(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _message(turn: Turn, index: int, *, thinking: bool) -> dict[str, Any]:
    if turn.role == "tool":
        return {"role": "tool", "content": turn.content, "tool_call_id": f"call_{index - 1}"}
    message: dict[str, Any] = {"role": turn.role, "content": turn.said(thinking=thinking)}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in turn.calls
        ]
    return message


def _same_calls(expected: list[Call], calls: list[tuple[str, str]]) -> bool:
    return len(expected) == len(calls) and all(
        call.name == name and _same_json(json.dumps(call.arguments), arguments)
        for call, (name, arguments) in zip(expected, calls, strict=True)
    )


def _same_json(expected: str, text: str) -> bool:
    """Equal values of equal types; the order of keys does not matter."""
    try:
        got = json.loads(text)
    except ValueError:
        return False
    return json.dumps(got, sort_keys=True) == json.dumps(json.loads(expected), sort_keys=True)


def _show_calls(calls: list[Call]) -> str:
    return "; ".join(
        f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in calls
    )
