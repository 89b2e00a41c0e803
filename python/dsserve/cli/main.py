"""The command `dsserve`: finds the subcommand, and turns every user error into one line and exit code 2."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import click

from dsserve.cli.args import nearest_message
from dsserve.config.version import package_version
from dsserve.errors import ConfigError, DsserveError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Exit code of everything the user can put right.
USER_ERROR = 2
_INTERRUPTED = 130

#: Subcommand -> (module that holds it, short help). They are imported when they run, to start fast.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "launch": ("dsserve.cli.launch", "Start a server."),
    "chat": ("dsserve.cli.chat", "Talk to a running server in the terminal."),
    "doctor": ("dsserve.cli.doctor", "Check what this machine has and lacks."),
    "debug": ("dsserve.cli.debug", "Parity tool and checkpoint generator."),
    "calibrate": ("dsserve.cli.calibrate", "Fit the temperatures of the draft confidences."),
    "version": ("dsserve.cli.version", "Print the version."),
}
#: Subcommands that are known but do not work yet.
PLANNED = ("bench", "batch", "gateway")


class _Commands(click.Group):
    """Subcommands by name of their module, each of which has a click command called `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in PLANNED:
            raise ConfigError(f"dsserve {name} is known but does not work yet in this version")
        if name.startswith("-"):
            raise ConfigError(f"unknown flag {name}; see dsserve --help")
        if name not in COMMANDS:
            raise ConfigError(nearest_message(f"unknown command {name}", name, list(COMMANDS)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=_Commands,
    name="dsserve",
    help="Serving engine for DeepSeek-V4.1 models.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_version(), "--version", prog_name="dsserve")
def cli() -> None:
    """Hold the subcommands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program name; `sys.argv[1:]` if None.

    Returns:
        The exit code: 0, 2 for a user error, 130 when interrupted, else that of the command.
    """
    try:
        result: Any = cli.main(
            args=list(sys.argv[1:] if arguments is None else arguments),
            prog_name="dsserve",
            standalone_mode=False,
        )
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USER_ERROR
    except click.ClickException as error:
        return _complain(error.format_message())
    except DsserveError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`dsserve launch --help | head`): nobody to tell.
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def _complain(message: str) -> int:
    line = " ".join(message.split())
    click.echo(f"dsserve: error: {line}", err=True)
    return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
