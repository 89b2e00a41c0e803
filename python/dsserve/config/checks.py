"""What makes a flag value wrong: type, range, choice, not working yet, or not with another flag."""

from __future__ import annotations

import ipaddress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsserve.config.flag import CURRENT_MILESTONE, Flag, Kind
from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from dsserve.config.server import ServerConfig


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


def check_relations(config: ServerConfig) -> None:
    """Check what one flag alone does not show, as far as it needs no model.

    Raises:
        ConfigError: Naming the flag, the value and the remedy.
    """
    page = config.page_size
    if page is not None and page & (page - 1):
        below = 1 << (page.bit_length() - 1)
        _fail("--page-size", page, f"must be a power of two; use {below} or {2 * below}")
    fraction = config.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        _fail("--mem-fraction-static", fraction, "must lie between 0 and 1, e.g. 0.8")
    if config.schedule_conservativeness <= 0:
        _fail(
            "--schedule-conservativeness",
            config.schedule_conservativeness,
            "must be positive, e.g. 1.0",
        )
    if config.chunked_prefill_size == 0:
        _fail("--chunked-prefill-size", 0, "use a number of rows, or -1 to leave prompts whole")
    tokens = config.max_total_tokens
    if page is not None and tokens is not None and tokens < page:
        _fail("--max-total-tokens", tokens, f"holds no page of {page} tokens; raise it")
    _check_host(config.host)
    _check_paths(config)


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


def _check_host(host: str) -> None:
    if any(character.isspace() or character in "/@" for character in host):
        _fail("--host", host, "is no host name or address; write e.g. 127.0.0.1")
    if host.replace(".", "").isdigit():
        try:
            ipaddress.ip_address(host)
        except ValueError:
            _fail("--host", host, "is no valid IPv4 address")


def _check_paths(config: ServerConfig) -> None:
    if config.model_path is not None and not Path(config.model_path).is_dir():
        _fail(
            "--model-path",
            config.model_path,
            "is no folder; give the folder of a checkpoint (nothing is downloaded)",
        )
    if config.tokenizer_path is not None and not Path(config.tokenizer_path).exists():
        _fail("--tokenizer-path", config.tokenizer_path, "does not exist")
    if config.served_model_name is not None and not config.served_model_name.strip():
        _fail("--served-model-name", repr(config.served_model_name), "is empty")
    for flag, key in (
        *(("--api-key", key) for key in config.api_key),
        ("--admin-api-key", config.admin_api_key),
    ):
        if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
            raise ConfigError(
                f"{flag}: a key may hold only printable ASCII characters without blanks", param=flag
            )


def _fail(flag: str, value: Any, remedy: str) -> None:
    raise ConfigError(f"{flag} {value}: {remedy}", param=flag)
