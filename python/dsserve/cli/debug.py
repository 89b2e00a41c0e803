"""`dsserve debug TOOL ...`: finds a tool of `dsserve.debug` by name when it runs."""

from __future__ import annotations

import importlib
import importlib.util

import click

from dsserve.cli.args import nearest_message
from dsserve.errors import ConfigError

#: Tool -> module with a function `main(arguments) -> int`.
TOOLS = {"forward": "dsserve.debug.forward", "make-tiny": "dsserve.debug.make_tiny"}


@click.command(
    "debug",
    help=f"Run a debugging tool: {', '.join(TOOLS)}. Its own --help lists its flags.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("tool")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(tool: str, arguments: tuple[str, ...]) -> int:
    """Run `tool` with the arguments that follow it."""
    if tool not in TOOLS:
        raise ConfigError(nearest_message(f"unknown tool {tool}", tool, list(TOOLS)))
    if importlib.util.find_spec(TOOLS[tool]) is None:
        raise ConfigError(f"dsserve debug {tool} is not part of this installation")
    code = importlib.import_module(TOOLS[tool]).main(list(arguments))
    return code if isinstance(code, int) else 0
