"""The configuration of one server: every launch flag as a field of one frozen dataclass.

The flags stand in `config/options/`, a dataclass per group; `config/sources.py` fills them from the command
line, the variables and the config file; `config/resolve.py` adds what depends on the model.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dsserve.config.checks import check_flag
from dsserve.config.flag import Flag, flags_of
from dsserve.config.options.cache import CacheOptions
from dsserve.config.options.deepseek import DeepseekOptions, DisaggregationOptions
from dsserve.config.options.http import HttpOptions
from dsserve.config.options.loading import LoadingOptions
from dsserve.config.options.operations import OperationsOptions
from dsserve.config.options.parallel import EplbOptions, ParallelOptions
from dsserve.config.options.schedule import ScheduleOptions
from dsserve.config.relations import check_http, check_loading, check_schedule
from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Heading of the help text -> the dataclass that declares the flags under it.
FLAG_GROUPS: Mapping[str, type[Any]] = {
    "Model and loading": LoadingOptions,
    "Server": HttpOptions,
    "Parallelism": ParallelOptions,
    "Memory and schedule": ScheduleOptions,
    "Cache tiers": CacheOptions,
    "DeepSeek features": DeepseekOptions,
    "EPLB": EplbOptions,
    "Disaggregation": DisaggregationOptions,
    "CUDA graphs and operations": OperationsOptions,
}


@dataclass(frozen=True, kw_only=True)
class ServerConfig(
    LoadingOptions,
    HttpOptions,
    ParallelOptions,
    ScheduleOptions,
    CacheOptions,
    DeepseekOptions,
    EplbOptions,
    DisaggregationOptions,
    OperationsOptions,
):
    """All launch flags, with the defaults of the flag table.

    A field is named as its flag, with underscores. None means "decided when the model is known"
    (`config.resolve.resolve`) where the help says auto, and "off" elsewhere.
    """

    def validate(self) -> None:
        """Check every value and what depends on several of them.

        Raises:
            ConfigError: For the first wrong value, naming the flag, the value and the remedy; also for a
                value that is known but does not work in this version.
        """
        for flag in all_flags():
            check_flag(flag, getattr(self, flag.name), _default_of(flag.name))
        check_schedule(self)
        check_http(self)
        check_loading(self)

    def replace(self, **changes: Any) -> ServerConfig:
        """Return a copy with some fields changed; it is not validated."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values that JSON can hold."""
        values = {flag.name: getattr(self, flag.name) for flag in all_flags()}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    def to_public_dict(self) -> dict[str, Any]:
        """Return `to_dict` with the keys of users left out, for logs and `/get_server_info`."""
        values = self.to_dict()
        for name in ("api_key", "admin_api_key"):
            if values[name]:
                values[name] = "***"
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerConfig:
        """Build from what `to_dict` gave.

        Raises:
            ConfigError: If a name is unknown.
        """
        known = {flag.name: flag for flag in all_flags()}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown configuration field {unknown[0]!r}", param=unknown[0])
        fields: dict[str, Any] = {
            name: tuple(value) if known[name].is_repeated else value
            for name, value in values.items()
        }
        return cls(**fields)

    def to_json(self) -> str:
        """Return the configuration as one JSON object."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> ServerConfig:
        """Build from what `to_json` gave.

        Raises:
            ConfigError: If the text is no JSON object or a name is unknown.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the configuration is no valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError("the configuration is not a JSON object")
        return cls.from_dict(values)


@cache
def all_flags() -> tuple[Flag, ...]:
    """Return every launch flag, in the order of the flag table."""
    return tuple(flag for options in FLAG_GROUPS.values() for flag in flags_of(options))


@cache
def spellings() -> Mapping[str, tuple[Flag, bool]]:
    """Return spelling -> (flag, what a switch of that spelling sets its field to)."""
    table: dict[str, tuple[Flag, bool]] = {}
    for flag in all_flags():
        table |= dict.fromkeys(flag.on, (flag, True))
        table |= dict.fromkeys(flag.off, (flag, False))
    return table


@cache
def _defaults() -> ServerConfig:
    return ServerConfig()


def _default_of(name: str) -> Any:
    return getattr(_defaults(), name)
