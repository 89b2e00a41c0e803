"""What one launch flag is: its spellings, its kind of value, and which values work today.

A field of an option dataclass is made by `option` or `switch`; the command line, the variables, the config
file, the help text and the checks are all generated from what they record.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Flags and values marked with a milestone up to this one work; later ones are known and refused.
CURRENT_MILESTONE = 3
#: Milestone of what comes after all numbered ones.
LATER = 99


class Kind(Enum):
    """How the text of a value is read."""

    TEXT = "TEXT"
    INT = "INT"
    FLOAT = "NUMBER"
    SIZE = "SIZE"
    JSON = "JSON"
    SWITCH = "SWITCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One launch flag, as the option dataclasses declare it.

    Attributes:
        name: Field name, which is the flag with underscores.
        on: Spellings that give the value (a switch: that turn the field on).
        off: Spellings of a switch that turn the field off.
        kind: How the text of a value is read.
        help: One sentence for the help text.
        milestone: The flag works from this milestone on.
        choices: Allowed values, each with the milestone from which it works; empty means any value.
        default_text: How the default reads in the help text.
        minimum: Smallest number allowed.
        maximum: Largest number allowed.
        is_repeated: May be given several times; the values add up.
        notice: Said once at start when the flag is given (flags that are accepted without effect).
    """

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...] = ()
    kind: Kind = Kind.TEXT
    help: str
    milestone: int
    choices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    default_text: str = ""
    minimum: float | None = None
    maximum: float | None = None
    is_repeated: bool = False
    notice: str = ""

    @property
    def works(self) -> bool:
        """Whether the flag has any effect in this version."""
        return self.milestone <= CURRENT_MILESTONE

    @property
    def spelling(self) -> str:
        """The first spelling, for messages."""
        return self.on[0]

    @property
    def working_choices(self) -> tuple[str, ...]:
        """The values that work in this version."""
        return tuple(value for value, since in self.choices.items() if since <= CURRENT_MILESTONE)


_METADATA_KEY = "dsserve.flag"


def option(
    default: Any,
    help_text: str,
    *,
    since: int,
    kind: Kind = Kind.TEXT,
    choices: Mapping[str, int] | None = None,
    default_text: str | None = None,
    aliases: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    is_repeated: bool = False,
    notice: str = "",
) -> Any:
    """Declare a flag that takes a value; `since` is the milestone from which it works."""
    record = {
        "kind": kind,
        "help": help_text,
        "milestone": since,
        "choices": choices or {},
        "default_text": _default_text(default) if default_text is None else default_text,
        "aliases": aliases,
        "minimum": minimum,
        "maximum": maximum,
        "is_repeated": is_repeated,
        "notice": notice,
    }
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={_METADATA_KEY: record})
    return dataclasses.field(default=default, metadata={_METADATA_KEY: record})


def switch(
    help_text: str,
    *,
    since: int,
    default: bool | None = False,
    off: tuple[str, ...] = (),
    on: tuple[str, ...] | None = None,
    default_text: str | None = None,
    notice: str = "",
) -> Any:
    """Declare a flag without a value; None as default means that the model decides."""
    record = {
        "kind": Kind.SWITCH,
        "help": help_text,
        "milestone": since,
        "default_text": ("on" if default else "off") if default_text is None else default_text,
        "on": on,
        "off": off,
        "notice": notice,
    }
    return dataclasses.field(default=default, metadata={_METADATA_KEY: record})


def flags_of(options: type[Any]) -> tuple[Flag, ...]:
    """Return the flags that an option dataclass declares, in order of declaration."""
    return tuple(
        _flag(each.name, each.metadata[_METADATA_KEY]) for each in dataclasses.fields(options)
    )


def _flag(name: str, record: Mapping[str, Any]) -> Flag:
    values = dict(record)
    aliases = values.pop("aliases", ())
    on = values.pop("on", None)
    values["on"] = on if on is not None else ("--" + name.replace("_", "-"), *aliases)
    return Flag(name=name, **values)


def _default_text(default: Any) -> str:
    if default is None or default == ():
        return "none"
    return str(default)
