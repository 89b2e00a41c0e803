"""Builds a ServerConfig from the command line, the `DSSERVE_*` variables and the `--config` file.

A flag beats a variable, a variable beats the file. A flag or value that is known but does not work yet is
refused wherever it stands, and every message names the place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dsserve.config.checks import check_flag, nearest, refuse_unless_working
from dsserve.config.env import OTHER_VARIABLES, PREFIX
from dsserve.config.flag import Flag, Kind
from dsserve.config.server import ServerConfig, all_flags, spellings
from dsserve.config.values import read_switch, read_value
from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Variables that Kubernetes sets for a service called "dsserve"; they are no settings.
_KUBERNETES = re.compile(r"DSSERVE_(SERVICE_(HOST|PORT).*|PORT_\d+_(TCP|UDP).*)")
#: Switches of SGLang -> the value of `--engram-placement` they stand for.
_ENGRAM_VARIABLES = {
    "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "host",
    "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": "sharded",
}
_ENGRAM_LAYOUT = "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated configuration and what is to be said about it at start.

    Attributes:
        config: The configuration, not yet resolved against a model.
        sources: Field name -> where its value came from, for the fields that somebody set.
        notices: Lines to log once at start.
    """

    config: ServerConfig
    sources: Mapping[str, str]
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Setting:
    flag: Flag
    raw: Any
    source: str
    #: What a switch of that spelling sets its field to.
    polarity: bool = True


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key may stand only once, so that no line of a file is lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping, or refuse it."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(given: Mapping[str, Any], variables: Mapping[str, str]) -> LoadedConfig:
    """Merge the three sources and check every value.

    Args:
        given: Field name -> text of the command line (a switch: bool; a repeated flag: list of texts).
        variables: The environment.

    Raises:
        ConfigError: For the first wrong, unknown or not yet working setting.
    """
    notices: list[str] = []
    flags = {flag.name: flag for flag in all_flags()}
    from_flags = [
        _Setting(flags[name], raw, _spelling_used(flags[name], raw)) for name, raw in given.items()
    ]
    from_variables = [
        *_engram_settings(variables, notices),
        *_variable_settings(variables, notices),
    ]
    path = _value_of("config", from_flags) or _value_of("config", from_variables)
    from_file = list(_file_settings(Path(path))) if path else []

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in (*from_file, *from_variables, *from_flags):
        values[setting.flag.name] = _checked(setting)
        sources[setting.flag.name] = setting.source
        if setting.flag.notice:
            notices.append(setting.flag.notice)
    config = ServerConfig(**values)
    config.validate()
    return LoadedConfig(config=config, sources=sources, notices=tuple(dict.fromkeys(notices)))


def unknown_flag(name: str) -> ConfigError:
    """Return the error for a flag that does not exist, with the nearest one that does."""
    hint = nearest(name.split("=", 1)[0], list(spellings()))
    return ConfigError(
        f"unknown flag {name}"
        + (f"; did you mean {hint}?" if hint else "; see dsserve launch --help"),
        param=name,
    )


def _spelling_used(flag: Flag, raw: Any) -> str:
    return flag.off[0] if raw is False and flag.off else flag.spelling


def _value_of(name: str, settings: list[_Setting]) -> str | None:
    found = [setting.raw for setting in settings if setting.flag.name == name]
    return str(found[-1]) if found else None


def _checked(setting: _Setting) -> Any:
    flag, source = setting.flag, setting.source
    refuse_unless_working(flag, source=source)
    if flag.kind is Kind.SWITCH:
        is_on = read_switch(setting.raw, source=source)
        return is_on if setting.polarity else not is_on
    value = read_value(flag, setting.raw, source=source)
    check_flag(flag, value, None, source=source)
    return value


def _variable_settings(variables: Mapping[str, str], notices: list[str]) -> Iterator[_Setting]:
    table = {
        PREFIX + spelling.removeprefix("--").replace("-", "_").upper(): found
        for spelling, found in spellings().items()
    }
    for name, raw in sorted(variables.items()):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES or _KUBERNETES.fullmatch(name):
            continue
        if name.startswith(PREFIX + "KERNEL_"):
            continue
        if name not in table:
            hint = nearest(name, list(table))
            notices.append(
                f"variable {name} is not known and has no effect"
                + (f" (did you mean {hint}?)" if hint else "")
            )
            continue
        if name == "DSSERVE_PORT" and re.match(r"(tcp|udp)://", raw):
            notices.append("variable DSSERVE_PORT looks set by Kubernetes and is ignored")
            continue
        flag, polarity = table[name]
        value = [part for part in raw.split(",") if part] if flag.is_repeated else raw
        yield _Setting(flag, value, name, polarity)


def _file_settings(path: Path) -> Iterator[_Setting]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}", param="--config") from None
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: no valid YAML: {where}", param="--config") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path}: expected lines such as 'port: 31000'", param="--config"
        )
    table = {spelling.removeprefix("--"): found for spelling, found in spellings().items()}
    seen: dict[str, Any] = {}
    for key, raw in content.items():
        name = str(key).replace("_", "-")
        if name not in table:
            hint = nearest(name, list(table))
            raise ConfigError(
                f"--config {path}: unknown key {key}" + (f"; did you mean {hint}?" if hint else ""),
                param="--config",
            )
        if name == "config":
            raise ConfigError(f"--config {path}: a file cannot name another file", param="--config")
        if raw is None:
            continue
        flag, polarity = table[name]
        other = seen.setdefault(flag.name, key)
        if other != key:
            raise ConfigError(
                f"--config {path}: {other} and {key} set the same flag; keep one", param="--config"
            )
        yield _Setting(flag, raw, f"{key} in {path}", polarity)


def _engram_settings(variables: Mapping[str, str], notices: list[str]) -> Iterator[_Setting]:
    """Map the Engram variables of SGLang to `--engram-placement`, which beats them, as does its own variable."""
    chosen = {
        name: placement for name, placement in _ENGRAM_VARIABLES.items() if _is_set(variables, name)
    }
    if len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(chosen)} name two placements of the Engram tables; unset one of them",
            param=next(iter(chosen)),
        )
    for name, placement in chosen.items():
        notices.append(f"{name} stands for --engram-placement {placement}")
        flag = next(flag for flag in all_flags() if flag.name == "engram_placement")
        yield _Setting(flag, placement, name)
    if variables.get(_ENGRAM_LAYOUT):
        notices.append(
            f"{_ENGRAM_LAYOUT} has no effect: the host placement always keeps one copy per node"
        )


def _is_set(variables: Mapping[str, str], name: str) -> bool:
    return bool(variables.get(name)) and read_switch(variables[name], source=name)
