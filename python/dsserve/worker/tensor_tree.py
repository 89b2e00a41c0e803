"""Replaces every tensor inside nested dataclasses, dicts and lists, for example to move a batch to a device."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """A copy of `value` with `change` applied to each tensor; what occurs twice is one object afterwards, too."""
    return cast("T", _mapped(value, change, {}))


def tensors_of(value: object) -> list[Tensor]:
    """Every tensor inside `value` once, in the order of `map_tensors`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(each, change, done) for key, each in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_mapped(each, change, done) for each in value)
    is_record = is_dataclass(value) and not isinstance(value, type)
    if not isinstance(value, Tensor) and not is_record:
        return value
    if id(value) not in done:
        done[id(value)] = (
            change(value)
            if isinstance(value, Tensor)
            else type(value)(
                **{f.name: _mapped(getattr(value, f.name), change, done) for f in fields(value)}
            )
        )
    return done[id(value)]
