"""What the draft model sees of the text so far: window rows made of the target's hidden states (dspark.md 1.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.config.model import ModelConfig
    from dsserve.kv.device import DevicePools
    from dsserve.models.deepseek_v4.params import Params
    from dsserve.models.deepseek_v4.rope import RopeTables


class DraftContext:
    """Turns taps of the target into the window rows of every stage."""

    def __init__(self, config: ModelConfig, params: Params, rope: RopeTables) -> None:
        """`params` is the view of the whole checkpoint."""
        self._ops = params.ops
        self._rope = rope
        self._first_layer = config.num_hidden_layers
        stages = range(config.num_nextn_predict_layers)
        self._project = params.under("mtp.0").fp8_linear("main_proj")
        self._norm = params.norm("mtp.0.main_norm")
        # One product for all stages: they read the same input.
        self._latents = params.fp8_linear(*(f"mtp.{stage}.attn.wkv" for stage in stages))
        self._kv_norms = [params.norm(f"mtp.{stage}.attn.kv_norm") for stage in stages]

    def write(self, taps: Tensor, positions: Tensor, store: Tensor, pools: DevicePools) -> None:
        """Write the rows of T target rows into the window rings of all stages.

        Args:
            taps: [T, taps * D].
            positions: [T] absolute positions.
            store: [T] ring rows, -1 = none.
            pools: Where the rings are.
        """
        cos_sin = self._rope.window(positions)
        latents = self._latents(self._norm(self._project(taps))).chunk(len(self._kv_norms), dim=1)
        for stage, (norm, latent) in enumerate(zip(self._kv_norms, latents, strict=True)):
            rows = self._ops.rope(norm(latent.contiguous()), cos_sin)
            self._ops.store_window_rows(pools.window[self._first_layer + stage], store, rows)


def history_rows(
    slots: Tensor, newest: Tensor, floors: Tensor, *, window: int, ring_rows: int
) -> Tensor:
    """Ring rows [B, W] of the positions that a block sees: the newest W ones, -1 below a request's floor.

    Runs where its inputs are; no value goes to the host.

    Args:
        slots: [B] request slots.
        newest: [B] t0: position of the newest token that the target has run.
        floors: [B] `tail_floor`: rows below do not exist.
        window: W, `sliding_window`.
        ring_rows: Rows of one slot's ring.
    """
    positions = newest.unsqueeze(1) + torch.arange(1 - window, 1, device=newest.device)
    rows = slots.unsqueeze(1) * ring_rows + positions % ring_rows
    return torch.where(positions >= floors.clamp_min(0).unsqueeze(1), rows, -1)
