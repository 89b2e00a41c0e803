"""Reading the value of one flag, from text or from YAML, with an error that names the remedy."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from dsserve.config.flag import Flag, Kind
from dsserve.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def read_value(flag: Flag, value: Any, *, source: str) -> Any:
    """Turn what a user wrote into the value of a field.

    Args:
        flag: The flag, which is not a switch (see `read_switch`).
        value: Text from the command line or a variable, or a YAML value.
        source: How the user named it (`--port`, `DSSERVE_PORT`, `port in serve.yaml`), for messages.

    Returns:
        The value in the type of the field; of a repeated flag, a tuple.

    Raises:
        ConfigError: Naming the source, the value and what is expected.
    """
    if flag.is_repeated:
        items = value if isinstance(value, list | tuple) else [value]
        if not items:
            # An empty list of keys would open a server that was meant to be closed.
            raise ConfigError(f"{source}: the value is empty; leave it out instead", param=source)
        return tuple(_scalar(flag, item, source) for item in items)
    return _scalar(flag, value, source)


def read_switch(value: Any, *, source: str) -> bool:
    """Read the value of a switch given as a variable or in a file.

    Raises:
        ConfigError: If it is neither true nor false.
    """
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(f"{source}: {value!r} is neither true nor false; use 1 or 0", param=source)


def read_size(text: str) -> int:
    """Read a number of bytes such as `64MiB`, `1.5 GB` or `65536`.

    Raises:
        ValueError: If the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(num_bytes: float) -> str:
    """Write a number of bytes with a binary unit, for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _scalar(flag: Flag, value: Any, source: str) -> Any:
    if flag.kind is Kind.JSON:
        return _json_object(value, source)
    if isinstance(value, dict | list | tuple | bool):
        raise ConfigError(f"{source}: expected one value, not {value!r}", param=source)
    text = str(value)
    if flag.kind is Kind.TEXT:
        if not text:
            raise ConfigError(f"{source}: the value is empty", param=source)
        return text
    try:
        number = _number(flag.kind, text)
    except ValueError:
        raise ConfigError(
            f"{source}: {text!r} is not {_EXPECTED[flag.kind]}", param=source
        ) from None
    return number


_EXPECTED = {
    Kind.INT: "a whole number",
    Kind.FLOAT: "a number",
    Kind.SIZE: "a size such as 64MiB or 67108864",
}


def _number(kind: Kind, text: str) -> int | float:
    if kind is Kind.SIZE:
        return read_size(text)
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    if kind is Kind.INT:
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _json_object(value: Any, source: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(
                f"{source}: no valid JSON ({error}); write an object such as '{{\"key\": 1}}'",
                param=source,
            ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object, not {value!r}", param=source)
    return value
