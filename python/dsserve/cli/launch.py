"""`dsserve launch`: flags -> resolved configuration -> server (or, with --dry-run, what it would be)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dsserve.cli.args import FlagCommand, given_flags
from dsserve.cli.default_model import embedded_model
from dsserve.cli.dry_run import describe
from dsserve.config.env import environment
from dsserve.config.model import load_model_config
from dsserve.config.resolve import resolve
from dsserve.config.sources import load_config
from dsserve.engine.memory import plan_memory

if TYPE_CHECKING:
    from dsserve.config.server import ServerConfig


@click.pass_context
def _launch(ctx: click.Context, /, **_values: Any) -> int:
    loaded = load_config(given_flags(ctx), environment())
    for notice in loaded.notices:
        _say(f"notice: {notice}")
    config = loaded.config
    if config.model_path is None:
        config = config.replace(model_path=str(embedded_model()))
    model = load_model_config(str(config.model_path), config.json_model_override_args)
    given, config = config, resolve(config, model)
    memory = plan_memory(config, model)
    if config.dry_run:
        click.echo(describe(config, model, memory))
        return 0
    _say(f"decided for {config.model_path}: {_decided(given, config)}")
    # Late, because the web stack is slow to import: a wrong flag and --dry-run are answered at once.
    from dsserve.entrypoints.server import run_server

    return run_server(config)


def _decided(given: ServerConfig, resolved: ServerConfig) -> str:
    """Name the automatic values and what they became."""
    before, after = given.to_dict(), resolved.to_dict()
    return ", ".join(f"{name}={after[name]}" for name in before if before[name] != after[name])


def _say(line: str) -> None:
    click.echo(f"dsserve: {line}", err=True)


command = FlagCommand(
    "launch",
    callback=_launch,
    help="Start a server for a model; without flags, the embedded model on 127.0.0.1:30000.",
)
