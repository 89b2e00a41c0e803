"""A runner whose batches go to its device as they are prepared, for code that plans steps by hand (parity tool)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve.worker.runner import Runner
from dsserve.worker.tensor_tree import map_tensors

if TYPE_CHECKING:
    import torch

    from dsserve.models.batch import ForwardBatch
    from dsserve.models.deepseek_v4.model import DeepseekV41Model
    from dsserve.worker.batch import PlanView
    from dsserve.worker.runner import RunnerSizes


class PlacedRunner(Runner):
    """Copies each batch and waits for it; the worker stages batches instead (`cuda_staging.py`)."""

    def __init__(self, model: DeepseekV41Model, sizes: RunnerSizes, device: torch.device) -> None:
        """See `Runner`."""
        super().__init__(model, sizes, device)
        self._device = device

    def prepare(self, plan: PlanView, *, all_logits: bool = False) -> ForwardBatch:
        """See `Runner.prepare`."""
        batch = super().prepare(plan, all_logits=all_logits)
        return map_tensors(batch, lambda tensor: tensor.to(self._device))
