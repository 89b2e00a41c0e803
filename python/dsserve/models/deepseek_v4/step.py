"""State of one forward that layers hand on: the current selection, and an optional capture for the parity tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.kv.device import DevicePools
    from dsserve.models.batch import ForwardBatch


class Capture(Protocol):
    """Receives intermediate tensors by name (`layer.3.topk`); see `debug/forward.py`."""

    def wants(self, kind: str) -> bool:
        """Whether tensors of this kind are recorded."""
        ...

    def record(self, kind: str, layer: int, tensor: Tensor, *, is_tail: bool) -> None:
        """Record one tensor; `is_tail` if its rows are those of the decoder half."""
        ...


@dataclass(slots=True)
class Step:
    """One forward in progress.

    Attributes:
        batch: What is run.
        pools: Where keys lie.
        main_index: [T, K] pool rows chosen by the latest index source, -1 = none.
        candidates: [T, N] positions inside the candidate blocks, or None while nothing is restricted.
        capture: Recorder of intermediate tensors, or None.
    """

    batch: ForwardBatch
    pools: DevicePools
    main_index: Tensor | None = None
    candidates: Tensor | None = None
    capture: Capture | None = field(default=None)

    def record(self, kind: str, layer: int, tensor: Tensor, *, is_tail: bool) -> None:
        """Hand a tensor to the capture, if there is one that wants it."""
        if self.capture is not None and self.capture.wants(kind):
            self.capture.record(kind, layer, tensor, is_tail=is_tail)
