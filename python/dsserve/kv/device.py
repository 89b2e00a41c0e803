"""Device pools of the cached components, in the native row formats, and the relay ring of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dsserve.kv.layout import TAIL_RING, TOKEN_RING, KvLayout
from dsserve_kernels.kvcache.decoded_rings import DecodedRings, ring_bytes

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig


#: Memory of the values of window rings that the CPU remembers, all layers together.
_RINGS_BYTES = 64 << 20


class DevicePools:
    """FULL rows by page, window rings and compressor tails by slot, last token ids by slot.

    Attributes:
        main: KV source layer -> [pages * rows per page, main row bytes] uint8. Page 0 is the dummy page.
        index: The same for index keys.
        window: Layer -> [slots * ring rows, window row bytes] uint8. Slot 0 is the padding slot. DSpark's stages follow
            as layers `num_hidden_layers + stage`; their rows come from the target's hidden states (dspark.md 1.1).
        tail: Ratio-2 source -> [slots * TAIL_RING, 2, head_dim] float32, (u, g) by position modulo TAIL_RING.
        rings: Layer -> values of the window rings that steps of few rows read last; none but on the CPU.
        token_ring: [slots * TOKEN_RING] int64, ids by position modulo TOKEN_RING.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KvLayout,
        *,
        num_pages: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        """Allocate everything.

        Args:
            config: The model.
            layout: Its row sizes.
            num_pages: Usable pages (the dummy page comes on top).
            num_slots: Slots, the padding slot included.
            device: Where the pools live.
        """

        def pool(rows: int, row_bytes: int) -> Tensor:
            if device.type == "cpu":
                # Memory that the system gives zeroed, page by page as it is first used.
                return torch.from_numpy(np.zeros((rows, row_bytes), dtype=np.uint8))
            return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)

        self.layout = layout
        pages = num_pages + 1
        self.main = {
            i: pool(pages * layout.rows_per_page(i), layout.main_row_bytes)
            for i in layout.source_ratios
        }
        self.index = {
            i: pool(pages * layout.rows_per_page(i), layout.index_row_bytes)
            for i in layout.source_ratios
        }
        ring = num_slots * layout.window_ring_rows
        self.window = {
            i: pool(ring, layout.window_row_bytes)
            for i in range(layout.num_window_layers + layout.num_draft_stages)
        }
        self.tail = {
            i: torch.zeros(
                num_slots * TAIL_RING, 2, config.head_dim, dtype=torch.float32, device=device
            )
            for i, ratio in layout.source_ratios.items()
            if ratio > 1
        }
        self.token_ring = torch.zeros(num_slots * TOKEN_RING, dtype=torch.int64, device=device)

        self.rings: dict[int, DecodedRings] = {}
        if device.type == "cpu":
            size = ring_bytes(layout.window_ring_rows, layout.window_row_bytes)
            most = max(_RINGS_BYTES // size // len(self.window), 1)
            self.rings = {i: DecodedRings(layout.window_ring_rows, most) for i in self.window}

    @property
    def draft_window(self) -> dict[int, Tensor]:
        """Stage -> window ring of the draft model; empty without one."""
        first, stages = self.layout.num_window_layers, self.layout.num_draft_stages
        return {stage: self.window[first + stage] for stage in range(stages)}
