"""Heads of the draft model behind its block: the Markov bias of each draft and its confidence (dspark.md 1.3, 1.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dsserve.models.deepseek_v4.params import Params


class DraftHeads:
    """Bias on a draft's logits from the token before it, and how likely the target accepts it."""

    def __init__(self, params: Params) -> None:
        """`params` is the view of the last stage."""
        self._embed = params.raw("markov_head.embed.weight")
        self._bias = params.fp32_linear("markov_head.head")
        self._confidence = params.fp32_linear("confidence_head.proj")

    def bias(self, previous: Tensor) -> Tensor:
        """Logit bias [B, V] float32 of the tokens [B] that precede the drafts."""
        return self._bias(self._embed[previous].float())

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Raw confidences, before temperature and sigmoid: [.., D] and the ids [..] before the drafts -> [..] float32."""
        joined = torch.cat((hidden.float(), self._embed[previous].float()), dim=-1)
        return self._confidence(joined).squeeze(-1)
