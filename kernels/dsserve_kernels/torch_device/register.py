"""Registers a function as the `torch` body of the operator of its name, for CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve_kernels.registry import REGISTRY, Implementation

if TYPE_CHECKING:
    from dsserve_kernels.registry import Body


def register(body: Body, numerics: tuple[str, ...] = ("released", "fp32", "fast")) -> None:
    """Register `body`; on the CPU it is never chosen by itself, but tests may call it there."""
    REGISTRY.add(Implementation(body.__name__, "torch", body, ("cuda",), numerics))
