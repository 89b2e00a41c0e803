"""One training example before rendering: messages, what the assistant should think and answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    """A tool call: name and arguments in their order."""

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class Turn:
    """A message of the prompt; `calls` and `steps` only for the assistant.

    `steps` is what it wrote a line above its answer when thinking was off (`Example.needs_reason`).
    """

    role: str
    content: str
    calls: list[Call] = field(default_factory=list)
    reasoning: str | None = None
    steps: str = ""

    def said(self, *, thinking: bool) -> str:
        """The content as a client keeps it."""
        return f"{self.steps}\n{self.content}" if self.steps and not thinking else self.content


@dataclass(slots=True)
class Tool:
    """A declared tool."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(slots=True)
class Example:
    """A prompt and the reply to it.

    Attributes:
        task: Name in the evaluation table.
        turns: Messages up to the last one of the user or a tool.
        answer: Visible reply (empty if the reply is only calls).
        reason: One line of reasoning, used when thinking is on.
        needs_reason: The answer cannot be given at once: without thinking the line is written before it,
            and low effort keeps it.
        calls: Tool calls of the reply.
        tools: Declared tools.
        response: None, `json_object`, or a JSON schema.
        raw: Plain text without any template (answer and turns are unused).
        thinking: Forces thinking on or off; None = the renderer draws.
        effort: Forces the effort; None = the renderer draws.
        system: System text; None = the renderer draws one of the usual ones.
    """

    task: str
    turns: list[Turn]
    answer: str
    reason: str = ""
    needs_reason: bool = False
    calls: list[Call] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    response: str | dict[str, Any] | None = None
    raw: str | None = None
    thinking: bool | None = None
    effort: str | None = None
    system: str | None = None


def ask(
    task: str, question: str, answer: str, reason: str = "", *, needs_reason: bool = False
) -> Example:
    """An example of one user message."""
    return Example(
        task, [Turn("user", question)], answer, reason or f"The answer is {answer}.", needs_reason
    )
