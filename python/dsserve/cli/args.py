"""Command-line options generated from the config dataclasses, and the errors of the command line."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dsserve.config.flag import Flag, Kind, flags_of
from dsserve.config.server import FLAG_GROUPS, all_flags
from dsserve.config.sources import unknown_flag
from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class FlagCommand(click.Command):
    """A command that takes the launch flags; its callback gets the raw texts of those given.

    Values stay text here: `config.sources.load_config` reads and checks flags, variables and file alike.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        help_all = click.Option(
            ["--help-all"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_print_all,
            help="Show the flags that do not work yet, too, and exit.",
        )
        super().__init__(name, params=[*map(_option, all_flags()), help_all], **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, turning click's complaints into ours."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise unknown_flag(error.option_name) from None
        except click.BadOptionUsage as error:
            raise ConfigError(error.format_message()) from None
        except click.UsageError as error:
            first = error.format_message()
            if "extra argument" in first:
                raise ConfigError(
                    f"{first}; flags start with --, a model is given by --model-path"
                ) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags under the headings of the flag table."""
        wants_all = bool(ctx.meta.get("dsserve.help_all"))
        num_hidden = 0
        for heading, options in FLAG_GROUPS.items():
            flags = [flag for flag in flags_of(options) if wants_all or flag.works]
            num_hidden += len(flags_of(options)) - len(flags)
            if flags:
                with formatter.section(heading):
                    formatter.write_dl([(_usage(flag), _help(flag)) for flag in flags])
        with formatter.section("Help"):
            formatter.write_dl(
                [
                    ("--help", "Show this text and exit."),
                    ("--help-all", f"Show {num_hidden} flags that do not work yet, too."),
                ]
            )
        formatter.write_paragraph()
        formatter.write_text(
            "Every flag can also be given as a variable (--page-size: DSSERVE_PAGE_SIZE) or in the file of "
            "--config (page-size: 64); a flag beats a variable, a variable beats the file."
        )


def given_flags(ctx: click.Context) -> dict[str, Any]:
    """Return field name -> raw value of the flags that stand on the command line."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def nearest_message(message: str, name: str, candidates: Sequence[str]) -> str:
    """Return `message` with the candidate most like `name`, or with all of them."""
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if found:
        return f"{message}; did you mean {found[0]}?"
    return f"{message}; there are: {', '.join(candidates)}"


def _option(flag: Flag) -> click.Option:
    if flag.kind is Kind.SWITCH:
        spelling = "/".join(filter(None, [flag.spelling, *flag.off]))
        return click.Option([spelling, flag.name], is_flag=True, default=None)
    return click.Option(
        [*flag.on, flag.name], type=click.STRING, multiple=flag.is_repeated, default=None
    )


def _usage(flag: Flag) -> str:
    names = ", ".join((*flag.on, *flag.off))
    if flag.kind is Kind.SWITCH:
        return names
    return f"{names} {'|'.join(flag.working_choices) or flag.kind.value}"


def _help(flag: Flag) -> str:
    later = [value for value in flag.choices if value not in flag.working_choices]
    parts = [flag.help]
    if not flag.works:
        parts.append("Does not work yet.")
    elif later:
        parts.append(f"Not yet: {', '.join(later)}.")
    return f"{' '.join(parts)} [{flag.default_text}]"


def _print_all(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if not value:
        return
    ctx.meta["dsserve.help_all"] = True
    click.echo(ctx.get_help(), color=ctx.color)
    ctx.exit()
