"""Drawing tokens without asking the host whether any row is random (serving.md d.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve_kernels.reference.sampling import draw_or_choose
from dsserve_kernels.torch_device.register import register

if TYPE_CHECKING:
    from torch import Tensor


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """See `reference.sampling.sample`."""
    return draw_or_choose(logits, temperature, top_k, top_p, min_p, seed, position)


register(sample)
