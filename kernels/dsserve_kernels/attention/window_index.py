"""Which window rows the rows of a step see, and what a body derived from that once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class WindowIndex:
    """Index tensors of one row set; int64, -1 = none.

    Attributes:
        window_index: [T, K] into the step's window rows: the context of all requests, then the T new rows.
        context_index: [C] rows of a window pool.
        window_store: [T] rows of a window pool that the new rows are written to.
        row_request: [T] request of each row, ascending.
        ring_rows: Pool rows of one request; its context lies inside one such ring.
        prepared: The selected body's own.
    """

    window_index: Tensor
    context_index: Tensor
    window_store: Tensor
    row_request: Tensor
    ring_rows: int
    prepared: dict[str, Any] = field(default_factory=dict)
