"""A runner whose batches go to its device as they are prepared, for code that plans steps by hand (parity tool)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsserve.worker.base import NUM_BUFFER_SETS
from dsserve.worker.batch import PlanView
from dsserve.worker.cuda_graphs import Bucket, DecodeGraphs, padding_plan
from dsserve.worker.cuda_staging import StagingRing
from dsserve.worker.runner import Runner
from dsserve.worker.tensor_tree import map_tensors
from dsserve_kernels.torch_device.tables import place_tables

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.models.batch import ForwardBatch
    from dsserve.models.deepseek_v4.model import DeepseekV41Model
    from dsserve.replay.prompt_rows import PromptRows
    from dsserve.worker.cuda_device import Device
    from dsserve.worker.runner import RunnerSizes

#: Requests of the decode graph: the one that runs, and rows of the padding slot beside it.
_GRAPH_REQUESTS = 4


class PlacedRunner(Runner):
    """Copies each batch and waits for it; the worker stages batches instead (`cuda_staging.py`)."""

    def __init__(
        self,
        model: DeepseekV41Model,
        sizes: RunnerSizes,
        device: torch.device,
        graph_device: Device | None = None,
    ) -> None:
        """See `Runner`; with a `graph_device`, decode steps are replays of a graph captured here."""
        super().__init__(model, sizes, device)
        self._device, self._graph_device = device, graph_device
        self._graphs: DecodeGraphs | None = None
        if graph_device is not None:
            self._graphs = self._captured(graph_device)

    def prepare(
        self, plan: PlanView, *, all_logits: bool = False, prompt_rows: PromptRows | None = None
    ) -> ForwardBatch:
        """See `Runner.prepare`."""
        batch = super().prepare(plan, all_logits=all_logits, prompt_rows=prompt_rows)
        return map_tensors(batch, lambda tensor: tensor.to(self._device))

    @torch.inference_mode()
    def decode(self, plan: PlanView) -> tuple[Tensor, Tensor]:
        """Logits [B, V] of a decode step, and the ring rows [B] of the tokens that will be drawn from them."""
        bucket = None if self._graphs is None else self._graphs.bucket_of(plan)
        if self._graphs is None or self._graph_device is None or bucket is None:
            batch = self.prepare(plan)
            return self.forward(batch), batch.sample_store
        self._graph_device.synchronize()
        with self._graph_device.launching():
            logits, store, _ = self._graphs.run(plan, bucket, ())
            logits, store = logits.clone(), store.clone()
        self._graph_device.synchronize()
        return logits, store

    @torch.inference_mode()
    def _captured(self, device: Device) -> DecodeGraphs:
        bucket = Bucket(_GRAPH_REQUESTS, self.sizes.context_length)
        staging = StagingRing(device, NUM_BUFFER_SETS)
        graphs = DecodeGraphs(device, self, staging, [bucket])
        device.synchronize()
        with device.launching(is_setup=True):
            place_tables(device.torch_device)
            graphs.capture(PlanView.of(padding_plan()))
        device.synchronize()
        return graphs
