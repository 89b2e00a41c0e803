"""Bytes of every cached component, from the model configuration alone (model.md sections 10 and 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig

#: Columns that share one scale: window rows (UE8M0), compressed rows (E4M3), index keys (UE8M0).
WINDOW_GROUP, MAIN_GROUP, INDEX_GROUP = 32, 16, 32
#: Rows a window ring holds beyond the window, so that rejected draft tokens never destroy committed rows
#: (at least draft block + 1; a power of two).
WINDOW_SLACK = 8
#: Positions a token ring or a compressor tail ring holds per slot (a power of two, more than a verify run plus the
#: 3-token Engram lookback).
TOKEN_RING, TAIL_RING = 16, 8


def window_row_bytes(head_dim: int) -> int:
    """E4M3 codes, then one UE8M0 byte per 32 (528 for head_dim 512)."""
    return head_dim + head_dim // WINDOW_GROUP


def main_row_bytes(head_dim: int) -> int:
    """Packed E2M1 codes, then one E4M3 scale per 16 (288 for head_dim 512)."""
    return head_dim // 2 + head_dim // MAIN_GROUP


def index_row_bytes(index_head_dim: int) -> int:
    """Packed E2M1 codes, then one UE8M0 byte per 32 (68 for index_head_dim 128)."""
    return index_head_dim // 2 + index_head_dim // INDEX_GROUP


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes of the components of one model at one page size."""

    page_size: int
    #: KV source layer -> compression ratio.
    source_ratios: dict[int, int]
    main_row_bytes: int
    index_row_bytes: int
    window_row_bytes: int
    window_ring_rows: int
    #: Layers of the target, and DSpark stages behind them (0 without speculation), that each have a window ring.
    num_window_layers: int
    num_draft_stages: int
    tail_bytes_per_slot: int

    @property
    def bytes_per_page(self) -> int:
        """FULL component: compressed rows and index keys of all KV sources under one page id."""
        return sum(self.rows_per_page(i) for i in self.source_ratios) * (
            self.main_row_bytes + self.index_row_bytes
        )

    @property
    def bytes_per_token(self) -> float:
        """FULL bytes per token (890 for the released model)."""
        return self.bytes_per_page / self.page_size

    @property
    def bytes_per_slot(self) -> int:
        """Request-private bytes: window rings of all layers and draft stages, and compressor tails."""
        rings = self.num_window_layers + self.num_draft_stages
        return rings * self.window_ring_rows * self.window_row_bytes + self.tail_bytes_per_slot

    def rows_per_page(self, source: int) -> int:
        """Compressed rows a page holds for one KV source."""
        return self.page_size // self.source_ratios[source]


def kv_layout(config: ModelConfig, page_size: int, *, draft: bool = False) -> KvLayout:
    """The layout of `config` at `page_size` tokens a page (a multiple of the stateful ratio).

    Args:
        config: The model.
        page_size: Tokens a page.
        draft: Whether DSpark runs: its stages then have window rings too.
    """
    ratios = {layer: config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
    stateful = sum(1 for ratio in ratios.values() if ratio > 1)
    return KvLayout(
        page_size=page_size,
        source_ratios=ratios,
        main_row_bytes=main_row_bytes(config.head_dim),
        index_row_bytes=index_row_bytes(config.index_head_dim),
        window_row_bytes=window_row_bytes(config.head_dim),
        window_ring_rows=config.sliding_window + WINDOW_SLACK,
        num_window_layers=config.num_hidden_layers,
        num_draft_stages=config.num_nextn_predict_layers if draft else 0,
        tail_bytes_per_slot=stateful * TAIL_RING * 2 * config.head_dim * 4,
    )
