"""State of one forward that layers hand on: the current selection, and an optional capture for the parity tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dsserve_kernels.attention.window_index import WindowIndex

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.kv.device import DevicePools
    from dsserve.models.batch import ForwardBatch, RowSet
    from dsserve.models.deepseek_v4.rope import RopeTables


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
        whole_selections: (ratio, tail rows?) -> positions and pool rows of a selection that leaves nothing out.
        index_keys: KV source -> index keys [B, N, di] of all requests, once they were read.
        capture: Recorder of intermediate tensors, or None.
        taps: Filled layer by layer with the draft model's input [T', D]: mean of the streams that enter each tap
            layer, rows of the decoder half. None: not wanted.
    """

    batch: ForwardBatch
    pools: DevicePools
    main_index: Tensor | None = None
    candidates: Tensor | None = None
    whole_selections: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    capture: Capture | None = field(default=None)
    taps: list[Tensor] | None = None
    _rotations: dict[tuple[bool, bool], Tensor] = field(default_factory=dict)
    _windows: dict[bool, WindowIndex] = field(default_factory=dict)

    def rotation(self, tables: RopeTables, rows: RowSet, *, is_compressed: bool) -> Tensor:
        """Rotary table rows of the given row set, the same for all layers of a kind: looked up once a step."""
        key = (is_compressed, rows is self.batch.decoder)
        cos_sin = self._rotations.get(key)
        if cos_sin is None:
            look_up = tables.compressed if is_compressed else tables.window
            cos_sin = self._rotations[key] = look_up(rows.positions)
        return cos_sin

    def window_index(self, rows: RowSet) -> WindowIndex:
        """Where the window rows of the given row set lie, the same object for all layers."""
        is_decoder = rows is self.batch.decoder
        index = self._windows.get(is_decoder)
        if index is None:
            index = self._windows[is_decoder] = WindowIndex(
                rows.window_index,
                rows.context_index,
                rows.window_store,
                rows.row_request,
                self.pools.layout.window_ring_rows,
            )
        return index

    def record(self, kind: str, layer: int, tensor: Tensor, *, is_tail: bool) -> None:
        """Hand a tensor to the capture, if there is one that wants it."""
        if self.capture is not None and self.capture.wants(kind):
            self.capture.record(kind, layer, tensor, is_tail=is_tail)
