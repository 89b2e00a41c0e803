"""What makes the value of one flag wrong: type, range, choice, or not working yet."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from dsserve.config.flag import CURRENT_MILESTONE, Flag, Kind
from dsserve.errors import ConfigError


def refuse_unless_working(flag: Flag, *, source: str) -> None:
    """Refuse a flag that is known but has no effect in this version.

    Raises:
        ConfigError: Saying so.
    """
    if not flag.works:
        raise ConfigError(
            f"{source} is known but does not work yet in this version; leave it out", param=source
        )


def check_flag(flag: Flag, value: Any, default: Any, *, source: str | None = None) -> None:
    """Check one value against what its flag allows.

    Args:
        flag: The flag.
        value: The value of its field; None is allowed where it is the default.
        default: The default of the field.
        source: How the user named it; the flag's spelling if None.

    Raises:
        ConfigError: Naming the source, the value and what is allowed.
    """
    name = source or flag.spelling
    if value is None and default is None:
        return
    if not flag.works and value != default:
        refuse_unless_working(flag, source=name)
    items = value if flag.is_repeated else (value,)
    if flag.is_repeated and not isinstance(value, tuple):
        raise ConfigError(f"{name}: expected a tuple, not {value!r}", param=name)
    for item in items:
        _check_type(flag, item, name)
        _check_range(flag, item, name)
        if flag.works:
            _check_choice(flag, item, name)


def nearest(name: str, candidates: list[str]) -> str | None:
    """Return the candidate most like `name`, or None if none is near."""
    found = get_close_matches(name, candidates, n=1, cutoff=0.6)
    return found[0] if found else None


def _check_type(flag: Flag, value: Any, name: str) -> None:
    expected: dict[Kind, tuple[tuple[type, ...], str]] = {
        Kind.TEXT: ((str,), "text"),
        Kind.INT: ((int,), "a whole number"),
        Kind.SIZE: ((int,), "a whole number of bytes"),
        Kind.FLOAT: ((int, float), "a number"),
        Kind.JSON: ((dict,), "an object"),
        Kind.SWITCH: ((bool,), "true or false"),
    }
    types, wording = expected[flag.kind]
    is_misplaced_bool = isinstance(value, bool) and flag.kind is not Kind.SWITCH
    if is_misplaced_bool or not isinstance(value, types):
        raise ConfigError(f"{name}: expected {wording}, not {value!r}", param=name)


def _check_range(flag: Flag, value: Any, name: str) -> None:
    too_small = flag.minimum is not None and value < flag.minimum
    too_large = flag.maximum is not None and value > flag.maximum
    if not too_small and not too_large:
        return
    if flag.minimum is None or flag.maximum is None:
        bound = f"at least {flag.minimum}" if too_small else f"at most {flag.maximum}"
    else:
        bound = f"between {flag.minimum} and {flag.maximum}"
    raise ConfigError(f"{name} {value}: must be {bound}", param=name)


def _check_choice(flag: Flag, value: Any, name: str) -> None:
    if not flag.choices:
        return
    working = ", ".join(flag.working_choices)
    since = flag.choices.get(value)
    if since is None:
        hint = nearest(str(value), list(flag.choices))
        raise ConfigError(
            f"{name} {value}: not a value of this flag; use {working}"
            + (f" (did you mean {hint}?)" if hint else ""),
            param=name,
        )
    if since > CURRENT_MILESTONE:
        raise ConfigError(
            f"{name} {value} is known but does not work yet in this version; use {working}",
            param=name,
        )
