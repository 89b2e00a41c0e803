"""`dsserve calibrate WHAT ...`: finds a calibration tool by name when it runs."""

from __future__ import annotations

import importlib

import click

from dsserve.cli.args import nearest_message
from dsserve.errors import ConfigError

#: What can be calibrated -> module with a function `main(arguments) -> int`.
TOOLS = {"dspark": "dsserve.debug.calibrate"}


@click.command(
    "calibrate",
    help=f"Fit constants to a model: {', '.join(TOOLS)}. Its own --help lists its flags.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("what")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(what: str, arguments: tuple[str, ...]) -> int:
    """Run the tool with the arguments that follow its name."""
    if what not in TOOLS:
        raise ConfigError(nearest_message(f"nothing to calibrate in {what}", what, list(TOOLS)))
    code = importlib.import_module(TOOLS[what]).main(list(arguments))
    return code if isinstance(code, int) else 0
