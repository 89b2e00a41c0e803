"""The two rotary tables of a model (model.md section 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve_kernels.reference.norm import rope_frequencies, rope_table, yarn_frequencies

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dsserve.config.model import ModelConfig


class RopeTables:
    """cos and sin by position: plain for window-only layers, YaRN for layers with compressed rows."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        """Tables for positions 0..length - 1."""
        dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        self._window = rope_table(rope_frequencies(dim, config.rope_theta), length).to(device)
        frequencies = yarn_frequencies(
            dim,
            config.compress_rope_theta,
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            original_length=scaling.original_max_position_embeddings,
        )
        self._compressed = rope_table(frequencies, length).to(device)

    def window(self, positions: Tensor) -> Tensor:
        """[T] -> [T, r / 2, 2] for ratio-0 layers."""
        return self._window[positions]

    def compressed(self, positions: Tensor) -> Tensor:
        """[T] -> [T, r / 2, 2] for ratio>0 layers, compressed rows and index keys."""
        return self._compressed[positions]
