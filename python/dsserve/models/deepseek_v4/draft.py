"""The DSpark draft model: proposes a block of tokens behind the newest one of each request (dspark.md section 1).

Block rows are scratch. Only rows that `write_context` made of the target's hidden states stay in the rings, so a
rejected draft leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsserve.models.batch import ForwardBatch, RowSet
from dsserve.models.deepseek_v4.draft_context import DraftContext
from dsserve.models.deepseek_v4.draft_heads import DraftHeads
from dsserve.models.deepseek_v4.engram import NO_ROWS
from dsserve.models.deepseek_v4.layer import Layer
from dsserve.models.deepseek_v4.step import Step

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.kv.device import DevicePools
    from dsserve.layers.linear import Fp32Linear
    from dsserve.models.deepseek_v4.params import Params
    from dsserve.models.deepseek_v4.rope import RopeTables

#: Chooses the k-th draft of every request from its logits [B, V] float32: (k, logits) -> ids [B].
Choose = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """What the stages say about a block, before its tokens are chosen.

    Attributes:
        base_logits: [B, gamma, V] float32; row k lacks the Markov bias of the token before draft k.
        hidden: [B, gamma, D] before the draft model's final norm.
    """

    base_logits: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of a batch.

    Attributes:
        ids: [B, gamma] int64.
        logits: [B, gamma, V] float32 that the ids were chosen from.
        confidence_raw: [B, gamma] float32; a sigmoid, after a temperature, estimates the chance that the target
            accepts a draft whose predecessors it accepted.
    """

    ids: Tensor
    logits: Tensor
    confidence_raw: Tensor


class DraftModel:
    """All stages and heads; embedding and LM head are the target's. Holds weights only, no request state."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        rope: RopeTables,
        *,
        embed: Tensor,
        head: Fp32Linear,
    ) -> None:
        """Prepare the weights.

        Args:
            config: The model.
            params: The whole checkpoint, `mtp.*` included.
            rope: Tables that cover the context and one block more.
            embed: The target's embedding [V, D].
            head: The target's LM head.
        """
        self._config, self._embed, self._head = config, embed, head
        self._ops = params.ops
        self._context = DraftContext(config, params, rope)
        self._stages = [
            Layer(
                config,
                params.under(f"mtp.{stage}"),
                config.num_hidden_layers + stage,
                rope,
                num_experts=config.dspark_n_routed_experts,
                top_k=config.dspark_num_experts_per_tok,
            )
            for stage in range(config.num_nextn_predict_layers)
        ]
        last = params.under(f"mtp.{config.num_nextn_predict_layers - 1}")
        self._norm = last.norm("norm")
        self._heads = DraftHeads(last)

    def write_context(
        self, taps: Tensor, positions: Tensor, store: Tensor, pools: DevicePools
    ) -> None:
        """Keep what the stages see of T target rows; the target's forward calls this.

        Args:
            taps: [T, taps * D]: means of the streams that enter the tap layers.
            positions: [T] absolute positions.
            store: [T] rows of the window rings, -1 = none.
            pools: Where the rings are.
        """
        self._context.write(taps, positions, store, pools)

    def block(
        self,
        anchors: Tensor,
        positions: Tensor,
        context_index: Tensor,
        *,
        gamma: int,
        pools: DevicePools,
    ) -> DraftBlock:
        """Run all stages on a block of each request; nothing is written.

        Args:
            anchors: [B] the newest id of each request, which the target has not run yet.
            positions: [B] its position, t0 + 1.
            context_index: [B, W] ring rows of the history, -1 = none (`draft_context.history_rows`).
            gamma: Drafts of a block.
            pools: Where the rings are.
        """
        rows = _block_rows(positions, context_index, gamma)
        step = Step(ForwardBatch.of_rows(rows), pools)
        count, streams_per_row = anchors.shape[0], self._config.hc_mult
        ids = anchors.new_full((count, gamma), self._config.dspark_noise_token_id)
        ids[:, 0] = anchors
        streams = self._embed[ids.view(-1)].unsqueeze(1).expand(-1, streams_per_row, -1)
        streams = streams.contiguous()
        pre = torch.zeros(count * gamma, streams_per_row, device=anchors.device)
        pre[:, 0] = 1.0
        for stage in self._stages:
            streams, pre = stage.forward(streams, pre, NO_ROWS, step)
        hidden = self._ops.hc_collapse(streams, pre)
        logits = self._head(self._norm(hidden))
        return DraftBlock(logits.view(count, gamma, -1), hidden.view(count, gamma, -1))

    def markov_logits(self, block: DraftBlock, k: int, previous: Tensor) -> Tensor:
        """Logits [B, V] float32 of draft k, given the ids [B] before it (the anchors for k = 0)."""
        return block.base_logits[:, k] + self._heads.bias(previous)

    def confidence(self, block: DraftBlock, previous: Tensor) -> Tensor:
        """Raw confidences [B, gamma] float32, given the ids [B, gamma] before each draft."""
        return self._heads.confidence(block.hidden, previous)

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context_index: Tensor,
        *,
        gamma: int,
        pools: DevicePools,
        choose: Choose | None = None,
    ) -> Proposal:
        """Draft a block for each request, token by token.

        Args:
            anchors: See `block`.
            positions: See `block`.
            context_index: See `block`.
            gamma: See `block`.
            pools: See `block`.
            choose: Picks the ids of a draft; arg-max (ties to the lower id) if None.
        """
        block = self.block(anchors, positions, context_index, gamma=gamma, pools=pools)
        chain, logits = [anchors], []
        for k in range(gamma):
            row = self.markov_logits(block, k, chain[-1])
            logits.append(row)
            chain.append(row.argmax(1) if choose is None else choose(k, row))
        confidence = self.confidence(block, torch.stack(chain[:-1], dim=1))
        return Proposal(torch.stack(chain[1:], dim=1), torch.stack(logits, dim=1), confidence)


def _block_rows(positions: Tensor, context_index: Tensor, gamma: int) -> RowSet:
    """Rows of the blocks: each sees its request's history and its whole block, later rows included."""
    count, window = context_index.shape
    offsets = torch.arange(gamma, device=positions.device)
    request = torch.arange(count, device=positions.device)
    history = request.unsqueeze(1) * window + torch.arange(window, device=positions.device)
    history = torch.where(context_index >= 0, history, -1)
    own = count * window + request.unsqueeze(1) * gamma + offsets
    seen = torch.cat((history, own), dim=1)
    no_floor = positions.new_zeros(count * gamma)  # the history has none but existing rows
    return RowSet(
        positions=(positions.unsqueeze(1) + offsets).view(-1),
        row_request=request.repeat_interleave(gamma),
        window_index=seen.repeat_interleave(gamma, dim=0),
        context_index=context_index.reshape(-1),
        window_store=positions.new_full((count * gamma,), -1),
        num_visible={},
        floor=no_floor,
    )
