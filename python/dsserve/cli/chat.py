"""`dsserve chat`: a terminal client of a running server, streaming, with thinking shown dimmed."""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from dsserve.cli.chat_client import ChatClient, ChatFailed, Delta
from dsserve.config.env import client_settings, no_color
from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

with contextlib.suppress(ImportError):  # a Python built without it
    import readline  # noqa: F401 - its import gives `input` arrow keys and a history

_PROMPT = "> "
DEFAULT_URL = "http://127.0.0.1:30000"
_HELP = """\
/think on|off   switch thinking (now {thinking})
/effort LEVEL   low, medium, high, max or a number (now {effort})
/system TEXT    set the system prompt and start anew; without a text, remove it
/reset          forget the conversation
/usage          tokens of the last answer
/help           this list
/quit           leave (as Ctrl-D); Ctrl-C stops an answer"""


@dataclass
class Session:
    """A conversation and its settings.

    Attributes:
        messages: The turns so far, as the API takes them.
        body: Fields of every request but the messages.
        usage: Usage of the last answer.
    """

    body: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    is_thinking: bool = True
    effort: str | None = None
    usage: dict[str, Any] | None = None

    def request(self) -> dict[str, Any]:
        """Return the body of the next request."""
        body = {**self.body, "messages": self.messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        body["thinking"] = {"type": "enabled" if self.is_thinking else "disabled"}
        if self.effort is not None and self.is_thinking:
            body["reasoning_effort"] = int(self.effort) if self.effort.isdigit() else self.effort
        return body

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation; keep the system prompt, or set a new one ("" removes it)."""
        kept = [turn for turn in self.messages if turn["role"] == "system"]
        if system is not None:
            kept = [{"role": "system", "content": system}] if system else []
        self.messages = kept
        self.usage = None


@click.command("chat", help="Talk to a running server in the terminal; /help lists the commands.")
@click.option("--base-url", default=None, help=f"Server [OPENAI_BASE_URL, else {DEFAULT_URL}].")
@click.option("--api-key", default=None, help="API key [OPENAI_API_KEY].")
@click.option("--model", default=None, help="Model name [the first that the server has].")
@click.option("--system", default="", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=None, help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=None, help="0 is greedy.")
@click.option("--disable-thinking", is_flag=True, help="Start with thinking off.")
def command(
    base_url: str | None,
    api_key: str | None,
    model: str | None,
    system: str,
    max_tokens: int | None,
    temperature: float | None,
    disable_thinking: bool,
) -> int:
    """Run the client until the input ends."""
    settings = client_settings()
    url = base_url or settings.base_url or DEFAULT_URL
    client = ChatClient(url, api_key or settings.api_key)
    console = Console(no_color=no_color(), highlight=False)
    try:
        name = model or client.first_model()
    except ChatFailed as error:
        raise ConfigError(str(error)) from None
    body: dict[str, Any] = {"model": name}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if temperature is not None:
        body["temperature"] = temperature
    session = Session(body, is_thinking=not disable_thinking)
    session.reset(system)
    if not sys.stdin.isatty():
        return _answer_piped(client, session, console)
    console.print(f"[bold]{name}[/] at {url}; /help lists the commands")
    return _converse(client, session, console)


def _converse(client: ChatClient, session: Session, console: Console) -> int:
    while True:
        try:
            line = input(_PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if not line:
            continue
        if line.startswith("/"):
            reply = run_slash_command(session, line)
            if reply is None:
                return 0
            console.print(reply, markup=False, style="dim")
            continue
        try:
            answer(client, session, line, console)
        except ChatFailed as error:
            console.print(f"error: {error}", markup=False, style="red")


def _answer_piped(client: ChatClient, session: Session, console: Console) -> int:
    text = sys.stdin.read().strip()
    if not text:
        raise ConfigError("the input is empty; type a message, or pipe one in")
    try:
        answer(client, session, text, console)
    except ChatFailed as error:
        raise ConfigError(str(error)) from None
    return 0


def run_slash_command(session: Session, line: str) -> str | None:
    """Run a line that starts with a slash; return what to say, or None to leave."""
    name, _, argument = line[1:].partition(" ")
    argument = argument.strip()
    if name in ("quit", "exit", "q"):
        return None
    if name == "reset":
        session.reset()
        return "conversation forgotten"
    if name == "system":
        session.reset(argument)
        return "system prompt set" if argument else "system prompt removed"
    if name == "think" and argument in ("on", "off"):
        session.is_thinking = argument == "on"
        return f"thinking is {argument}"
    if name == "effort" and argument:
        session.effort = argument
        return f"effort is {argument}"
    if name == "usage":
        return _usage_line(session.usage)
    state = {
        "thinking": "on" if session.is_thinking else "off",
        "effort": session.effort or "default",
    }
    prefix = "" if name == "help" else f"no such command: {line}\n"
    return prefix + _HELP.format(**state)


def answer(client: ChatClient, session: Session, text: str, console: Console) -> None:
    """Send one user turn, show the answer as it comes, and keep it in the conversation.

    A turn that fails is taken back, so that the next one starts from a state the server can take.

    Raises:
        ChatFailed: If the server refuses, is gone, or breaks off.
    """
    turns = len(session.messages)
    session.messages.append({"role": "user", "content": text})
    try:
        message = _show(client.stream(session.request()), session, console)
    except ChatFailed:
        del session.messages[turns:]
        raise
    session.messages.append(message)


def _show(deltas: Iterable[Delta], session: Session, console: Console) -> dict[str, Any]:
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[str] = []
    finish_reason = None
    try:
        for delta in deltas:
            if delta.reasoning:
                console.print(
                    _printable(delta.reasoning), end="", markup=False, style="dim", soft_wrap=True
                )
                reasoning.append(delta.reasoning)
            if delta.content:
                if reasoning and not content:
                    console.print("\n")
                console.print(_printable(delta.content), end="", markup=False, soft_wrap=True)
                content.append(delta.content)
            calls += delta.tool_calls
            finish_reason = delta.finish_reason or finish_reason
            session.usage = delta.usage or session.usage
    except KeyboardInterrupt:
        finish_reason = "stopped"
    console.print()
    if calls:
        console.print(_printable(f"tool calls: {''.join(calls)}"), markup=False, style="cyan")
    if finish_reason not in ("stop", None):
        console.print(f"({finish_reason})", markup=False, style="dim")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    return message


def _printable(text: str) -> str:
    """Take out control characters: a model must not be able to steer the terminal."""
    return "".join(each for each in text if each in "\n\t" or unicodedata.category(each) != "Cc")


def _usage_line(usage: dict[str, Any] | None) -> str:
    if usage is None:
        return "no answer yet"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return (
        f"prompt {usage.get('prompt_tokens')} tokens ({cached} cached), "
        f"answer {usage.get('completion_tokens')} tokens"
    )
