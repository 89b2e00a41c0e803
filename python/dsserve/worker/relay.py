"""State that one step leaves on the device for the next, by request slot (serving.md a.10).

Beside it the token ring of `DevicePools` holds the newest ids of each slot: those of committed positions, the anchor
(sampled, not yet run) at `committed_len`, and the drafts behind it. While a step with drafts is in flight the host
knows only upper bounds; what the next step needs of the truth it reads here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsserve.kv.layout import TOKEN_RING

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig


class Relay:
    """Relay buffers and the page table; slot 0 is the padding slot, whose content means nothing.

    Attributes:
        committed_len: [slots] int64, tokens whose KV is valid: the position of the anchor.
        survival: [slots, gamma] float32, chance that draft j and all before it are accepted.
        draft_logits: [slots, gamma, V] float32 that the drafts were drawn from, or None where nobody needs them.
        page_table: [slots, columns] int64.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_columns: int,
        gamma: int,
        keeps_logits: bool,
        device: torch.device,
    ) -> None:
        """Allocate everything, zeroed.

        Args:
            config: The model.
            num_slots: Slots, the padding slot included.
            num_columns: Pages a request can have.
            gamma: Drafts of a block.
            keeps_logits: Whether the drafts' logits are kept (`draft_logits`).
            device: Where it lives.
        """
        self.committed_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.survival = torch.zeros(num_slots, gamma, dtype=torch.float32, device=device)
        self.draft_logits = (
            torch.zeros(num_slots, gamma, config.vocab_size, dtype=torch.float32, device=device)
            if keeps_logits
            else None
        )
        self.page_table = torch.zeros(num_slots, num_columns, dtype=torch.int64, device=device)

    def write_pages(self, deltas: Tensor) -> None:
        """Apply page-table changes [N, 3]: slot, column, page. No entry is there twice."""
        self.page_table[deltas[:, 0], deltas[:, 1]] = deltas[:, 2]


def ring_rows(slots: Tensor, positions: Tensor) -> Tensor:
    """Rows of the flat token ring where the ids at `positions` of `slots` lie (shapes broadcast)."""
    return slots * TOKEN_RING + positions % TOKEN_RING
