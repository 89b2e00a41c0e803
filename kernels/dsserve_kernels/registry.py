"""Which bodies exist for each operator: the plain torch reference of every one, and faster ones beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Body = Callable[..., Any]
BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True, slots=True)
class Implementation:
    """One body of an operator.

    Attributes:
        operator: Operator name (kernels.md section 2).
        name: `reference`, `triton`, `cuda`, ..; the value of `DSSERVE_KERNEL_<OPERATOR>`.
        body: The function.
        platforms: Device types it runs on (`cpu`, `cuda`).
        numerics: Policies it satisfies (`released`, `fp32`, `fast`).
        exact: Whether its results are within kernels.md section 5 of the reference.
    """

    operator: str
    name: str
    body: Body
    platforms: tuple[str, ...]
    numerics: tuple[str, ...]
    exact: bool = True


@dataclass(slots=True)
class Registry:
    """All implementations, in order of preference within an operator (later registrations first)."""

    by_operator: dict[str, list[Implementation]] = field(default_factory=dict)

    def add(self, implementation: Implementation) -> None:
        """Register a body; a second one of the same name is a mistake of ours."""
        bodies = self.by_operator.setdefault(implementation.operator, [])
        if any(body.name == implementation.name for body in bodies):
            raise ValueError(
                f"operator {implementation.operator} already has a body {implementation.name}"
            )
        bodies.insert(0, implementation)

    def operators(self) -> list[str]:
        """Names of all operators, sorted."""
        return sorted(self.by_operator)


REGISTRY = Registry()


def reference(operator: str) -> Callable[[BodyT], BodyT]:
    """Register a function as the reference body: any device, any policy, the oracle of all tests."""

    def register(body: BodyT) -> BodyT:
        REGISTRY.add(
            Implementation(
                operator, "reference", body, ("cpu", "cuda"), ("released", "fp32", "fast")
            )
        )
        return body

    return register
