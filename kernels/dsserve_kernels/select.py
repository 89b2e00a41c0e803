"""Chooses one body per operator when a model is built; the choice is logged once and can be overridden.

`DSSERVE_KERNEL_<OPERATOR>=reference|triton|cuda|..` picks a body by name, for bisection.
"""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

from dsserve_kernels import reference as _reference  # noqa: F401 - registers every reference body
from dsserve_kernels.attention import numpy_attention as _numpy_attention  # noqa: F401 - registers
from dsserve_kernels.attention import numpy_window as _numpy_window  # noqa: F401 - registers
from dsserve_kernels.engram import numpy_engram as _numpy_engram  # noqa: F401 - registers
from dsserve_kernels.fused import numpy_attention as _fused_attention  # noqa: F401 - registers
from dsserve_kernels.fused import numpy_experts as _fused_experts  # noqa: F401 - registers
from dsserve_kernels.fused import numpy_streams as _fused_streams  # noqa: F401 - registers
from dsserve_kernels.gemm import numpy_linear as _numpy_linear  # noqa: F401 - registers
from dsserve_kernels.indexer import numpy_selection as _numpy_selection  # noqa: F401 - registers
from dsserve_kernels.kvcache import numpy_rows as _numpy_rows  # noqa: F401 - registers
from dsserve_kernels.mhc import numpy_sinkhorn as _numpy_sinkhorn  # noqa: F401 - registers
from dsserve_kernels.mhc import numpy_streams as _numpy_streams  # noqa: F401 - registers
from dsserve_kernels.moe import numpy_experts as _numpy_experts  # noqa: F401 - registers
from dsserve_kernels.norm import numpy_norm as _numpy_norm  # noqa: F401 - registers
from dsserve_kernels.quant import numpy_fp4 as _numpy_fp4  # noqa: F401 - registers
from dsserve_kernels.registry import REGISTRY, Implementation
from dsserve_kernels.torch_device import draw as _draw  # noqa: F401 - registers
from dsserve_kernels.torch_device import experts as _experts  # noqa: F401 - registers
from dsserve_kernels.torch_device import rotation as _rotation  # noqa: F401 - registers
from dsserve_kernels.torch_device import rows as _rows  # noqa: F401 - registers

logger = logging.getLogger(__name__)

PREFIX = "DSSERVE_KERNEL_"


class SelectionError(ValueError):
    """An override names an unknown operator, or a body that does not exist or does not fit."""


class Operators(SimpleNamespace):
    """The chosen body of every operator, as attributes."""


def select_operators(platform: str, numerics: str) -> Operators:
    """The bodies for a device type and a numeric policy.

    Args:
        platform: `cpu` or `cuda`.
        numerics: `released`, `fp32` or `fast`.

    Raises:
        SelectionError: If an environment override cannot be honoured.
    """
    overrides = {k[len(PREFIX) :].lower(): v for k, v in os.environ.items() if k.startswith(PREFIX)}
    unknown = sorted(set(overrides) - set(REGISTRY.operators()))
    if unknown:
        raise SelectionError(
            f"{PREFIX}{unknown[0].upper()}: no such operator; there are: {', '.join(REGISTRY.operators())}"
        )
    chosen = {
        name: _choose(name, platform, numerics, overrides.get(name))
        for name in REGISTRY.operators()
    }
    others = {name: body.name for name, body in chosen.items() if body.name != "reference"}
    logger.info(
        "kernels on %s (%s): reference for all operators but %s",
        platform,
        numerics,
        others or "none",
    )
    return Operators(**{name: implementation.body for name, implementation in chosen.items()})


def _choose(operator: str, platform: str, numerics: str, wanted: str | None) -> Implementation:
    bodies = REGISTRY.by_operator[operator]
    fitting = [b for b in bodies if platform in b.platforms and numerics in b.numerics]
    if wanted is None:
        return fitting[0]
    for body in fitting:
        if body.name == wanted:
            return body
    names = ", ".join(b.name for b in fitting)
    raise SelectionError(
        f"{PREFIX}{operator.upper()}={wanted}: not available on {platform}; there are: {names}"
    )
