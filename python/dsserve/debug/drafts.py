"""Drafts of a greedy run, one block behind each decode step, under the names of the golden files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsserve.models.deepseek_v4.draft_context import history_rows

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.models.deepseek_v4.draft import DraftModel, Proposal
    from dsserve.worker.runner import Runner


class DraftRecorder:
    """Runs the draft model of a runner for one request, as serving does, and keeps what it proposes."""

    def __init__(self, runner: Runner, draft: DraftModel, *, slot: int, floor: int) -> None:
        """`floor` is the request's `tail_floor`."""
        self._runner, self._draft = runner, draft
        self._device = runner.pools.token_ring.device
        self._slot, self._floor = self._number(slot), self._number(floor)
        self._anchors: list[Tensor] = []
        self._proposals: list[Proposal] = []

    @torch.inference_mode()
    def propose(self, anchor: Tensor, position: int) -> None:
        """Draft behind `anchor` [1], the token that was sampled for `position`."""
        config, pools = self._runner.model.config, self._runner.pools
        history = history_rows(
            self._slot,
            self._number(position - 1),
            self._floor,
            window=config.sliding_window,
            ring_rows=pools.layout.window_ring_rows,
        )
        self._anchors.append(anchor)
        self._proposals.append(
            self._draft.propose(
                anchor,
                self._number(position),
                history,
                gamma=config.dspark_block_size,
                pools=pools,
            )
        )

    def _number(self, value: int) -> Tensor:
        """[1] int64 on the device."""
        return torch.tensor([value], device=self._device)

    def tensors(self) -> dict[str, Tensor]:
        """`draft_ids` [n, 1 + gamma], `draft_logits` [n, gamma, V] and `draft_confidence` [n, gamma]."""
        if not self._proposals:
            return {}
        ids = [
            torch.cat((anchor.unsqueeze(1), proposal.ids), dim=1)
            for anchor, proposal in zip(self._anchors, self._proposals, strict=True)
        ]
        return {
            "draft_ids": torch.cat(ids).to(torch.int32),
            # The golden files store these logits in BF16; nothing is computed from the rounded ones.
            "draft_logits": torch.cat([p.logits for p in self._proposals]).bfloat16(),
            "draft_confidence": torch.cat([p.confidence_raw for p in self._proposals]),
        }
