"""Layers run one by one with the inputs that the CPU's reference path has there: streams, pre-mix, selection and caches.

The model's own forward runs on the CPU; at each of its layers the same layer of other models runs too, on copies of
what it is given and of all pools as they are at that point. So no difference is handed on from layer to layer.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import softplus

from dsserve.debug.capture import TensorCapture
from dsserve.models.deepseek_v4.step import Step
from dsserve.worker.runner import Runner
from dsserve.worker.tensor_tree import map_tensors
from model_runs import Pool, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from dsserve.kv.device import DevicePools
    from dsserve.models.batch import ForwardBatch
    from dsserve.models.deepseek_v4.model import DeepseekV41Model
    from dsserve_kernels.fused.weights import Experts

KINDS = ("stream", "next_pre", "topk", "index_scores", "route_ids")
#: Pools whose rows a layer writes, and the operator that reads them.
POOLS = {"main": "load_main_rows", "index": "load_index_rows", "window": "load_window_rows"}


@dataclass(frozen=True)
class Output:
    """What one layer made of its inputs, on the CPU.

    Attributes:
        tensors: By kind (`KINDS`), as the parity tool captures them.
        candidates: [T, N] positions that later index sources may choose; None if all.
        router_scores: [T, E] float64, the biased scores that experts are chosen by.
        stored: `main`, `index`, `window` -> values of all rows of the layer's pool.
    """

    tensors: dict[str, Tensor]
    candidates: Tensor | None
    router_scores: Tensor
    stored: dict[str, Tensor]


@dataclass(frozen=True)
class LayerRun:
    """One layer in one step: the reference path, and others on the same inputs.

    Attributes:
        layer: Its index.
        reference: On the CPU.
        others: In the order of the models.
    """

    layer: int
    reference: Output
    others: tuple[Output, ...]


@dataclass(frozen=True)
class Other:
    """A model whose layers are fed.

    Attributes:
        model: Its layers and operators.
        device: Where they are.
        change: What becomes of the streams that it is given.
    """

    model: DeepseekV41Model
    device: torch.device
    change: Callable[[Tensor], Tensor] = lambda streams: streams


class LayerRuns:
    """A prompt, then single tokens, through the reference path, with other models at its side."""

    def __init__(self, model: DeepseekV41Model, others: Sequence[Other], *, length: int) -> None:
        """`model` is the reference on the CPU; `length` bounds the tokens."""
        self._pool = Pool(model, num_requests=1, length=length)
        self._reference = self._pool.runner
        self._others = [
            _Fed(other, Runner(other.model, self._reference.sizes, other.device))
            for other in others
        ]
        self._golden: Mapping[str, Tensor] = {}
        self._runs: list[LayerRun] = []

    def run(
        self, prompt: Sequence[int], tokens: Sequence[int], golden: Mapping[str, Tensor]
    ) -> list[LayerRun]:
        """Every layer of every step.

        Args:
            prompt: Runs in one step.
            tokens: Decoded behind it, one a step.
            golden: `layer.I.stream` and `layer.I.next_pre` of the prompt, where known: what layer I + 1 is fed.
        """
        request = Request(self._pool, prompt)
        self._runs, self._golden = [], golden
        with self._hooked():
            self._step(request.prefill(len(prompt)))
            self._golden = {}
            for token in tokens:
                self._step(request.decode(token))
        return self._runs

    def _step(self, plan: Any) -> None:
        self._reference.forward(self._reference.prepare(plan, all_logits=True))

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """The reference's layers call the others first."""
        model = self._reference.model
        layers = model._layers
        model._layers = [_Hook(layer, index, self) for index, layer in enumerate(layers)]
        try:
            yield
        finally:
            model._layers = layers

    def at_layer(
        self, layer: Any, index: int, streams: Tensor, pre: Tensor, rows: Any, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Run a layer everywhere; returns what the next one is fed."""
        others = tuple(
            other.run(index, streams, pre, rows, step, self._reference.pools)
            for other in self._others
        )
        step.capture = capture = TensorCapture(KINDS)
        with router_inputs(self._reference.model) as seen:
            streams, pre = layer.forward(streams, pre, rows, step)
        reference = _output(index, capture, step, seen, self._reference)
        self._runs.append(LayerRun(index, reference, others))
        return (
            self._golden.get(f"layer.{index}.stream", streams),
            self._golden.get(f"layer.{index}.next_pre", pre),
        )


@dataclass(frozen=True)
class _Hook:
    """Stands where a layer of the reference stood."""

    layer: Any
    index: int
    runs: LayerRuns

    def forward(self, streams: Tensor, pre: Tensor, rows: Any, step: Step) -> tuple[Tensor, Tensor]:
        return self.runs.at_layer(self.layer, self.index, streams, pre, rows, step)


@dataclass(frozen=True)
class _Rows:
    """Engram rows that the reference looked up, elsewhere."""

    rows: Any
    device: torch.device

    def values(self, table: int) -> Tensor:
        values: Tensor = self.rows.values(table).to(self.device)
        return values


@dataclass
class _Fed:
    """Another model with pools of its own, which are overwritten before each layer."""

    other: Other
    runner: Runner
    batch: ForwardBatch | None = None
    batch_of: ForwardBatch | None = None

    def __post_init__(self) -> None:
        # The reference's own model may be fed, too, whose layers are hooked then.
        self.layers = self.other.model._layers

    def run(
        self, index: int, streams: Tensor, pre: Tensor, rows: Any, step: Step, pools: DevicePools
    ) -> Output:
        """The layer on copies of the reference's inputs."""
        device = self.other.device
        if self.batch is None or self.batch_of is not step.batch:
            self.batch_of = step.batch
            self.batch = map_tensors(step.batch, lambda tensor: tensor.to(device))
        _copy_pools(pools, self.runner.pools)
        capture = TensorCapture(KINDS)
        fed = Step(
            self.batch,
            self.runner.pools,
            main_index=None if step.main_index is None else step.main_index.to(device),
            candidates=None if step.candidates is None else step.candidates.to(device),
            capture=capture,
        )
        given = self.other.change(streams).to(device)
        with router_inputs(self.other.model) as seen:
            self.layers[index].forward(given, pre.to(device), _Rows(rows, device), fed)
        return _output(index, capture, fed, seen, self.runner)


@contextmanager
def router_inputs(model: DeepseekV41Model) -> Iterator[list[tuple[Tensor, Experts]]]:
    """What enters router and experts meanwhile, with their weights."""
    seen: list[tuple[Tensor, Experts]] = []
    body = model.ops.experts

    def watched(ops: Any, x: Tensor, weights: Experts) -> Any:
        seen.append((x, weights))
        return body(ops, x, weights)

    model.ops.experts = watched
    try:
        yield seen
    finally:
        model.ops.experts = body


def _copy_pools(source: DevicePools, target: DevicePools) -> None:
    for name in (*POOLS, "tail"):
        for layer, pool in getattr(source, name).items():
            getattr(target, name)[layer].copy_(pool)
    target.token_ring.copy_(source.token_ring)
    # What a body on the CPU remembers of rows that were overwritten just now.
    target.rings.clear()


def _output(
    index: int,
    capture: TensorCapture,
    step: Step,
    seen: list[tuple[Tensor, Experts]],
    runner: Runner,
) -> Output:
    prefix = f"layer.{index}."
    tensors = {name.removeprefix(prefix): t.cpu() for name, t in capture.tensors().items()}
    stored = {}
    for name, load in POOLS.items():
        pool = getattr(runner.pools, name).get(index)
        if pool is not None:
            every = torch.arange(pool.shape[0], device=pool.device).unsqueeze(0)
            stored[name] = getattr(runner.model.ops, load)(pool, every, torch.float32).cpu()
    [(x, weights)] = seen
    logits = x.double() @ weights.gate.double().mT / weights.temperature
    return Output(
        tensors,
        None if step.candidates is None else step.candidates.cpu(),
        (softplus(logits).sqrt() + weights.bias.double()).cpu(),
        stored,
    )
