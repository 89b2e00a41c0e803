"""Log-probabilities of prompt tokens: which rows of a whole extend give them.

Decoder replay leaves the logits of most prompt rows out. A request that wants them runs its whole extend through the
decoder half (`whole_extend`) and takes no cached prefix beyond the first row it wants (`max_cached_len`); the result is
that of a full prefill from the hit on (replay.md sections 2 and 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PromptWish:
    """What a request wants of its prompt.

    Attributes:
        token_ids: [prompt length] ids.
        start: First row whose prediction is wanted: that of the token at `start + 1`.
    """

    token_ids: NDArray[np.integer]
    start: int


class PromptPlan(Protocol):
    """What a step plan tells of its rows (B requests); see `worker.batch.PlanView`."""

    request_id: NDArray[np.uint64]
    start_position: NDArray[np.int64]
    cu_seqlens: NDArray[np.int64]
    tail_len: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Rows of one step that predict prompt tokens.

    Attributes:
        rows: [n] rows of the decoder half.
        token_ids: [n] the token each row is asked for.
        positions: [n] where that token stands in its prompt.
        requests: [n] 0..B-1.
    """

    rows: Tensor
    token_ids: Tensor
    positions: NDArray[np.int64]
    requests: NDArray[np.int64]

    @classmethod
    def of(cls, plan: PromptPlan, wishes: Mapping[int, PromptWish]) -> PromptRows:
        """Find the rows of a step.

        Args:
            plan: The step. Rows of requests with a wish must all run the decoder half.
            wishes: By request id; requests without one may have any other rows.

        Raises:
            ValueError: A request with a wish has rows that the decoder half leaves out.
        """
        lengths = np.diff(plan.cu_seqlens)
        first_row = np.cumsum(plan.tail_len) - plan.tail_len
        rows, ids, positions, requests = [], [], [], []
        for index, request_id in enumerate(plan.request_id.tolist()):
            wish = wishes.get(request_id)
            if wish is None:
                continue
            if plan.tail_len[index] != lengths[index]:
                raise ValueError(
                    f"request {request_id} wants rows of its prompt, but is no whole extend"
                )
            start = int(plan.start_position[index])
            first = max(start, wish.start)
            stop = min(start + int(lengths[index]), len(wish.token_ids) - 1)
            wanted = np.arange(first, max(stop, first))
            rows.append(first_row[index] + wanted - start)
            ids.append(np.asarray(wish.token_ids, dtype=np.int64)[wanted + 1])
            positions.append(wanted + 1)
            requests.append(np.full(len(wanted), index))
        return cls(
            rows=torch.from_numpy(_joined(rows)),
            token_ids=torch.from_numpy(_joined(ids)),
            positions=_joined(positions),
            requests=_joined(requests),
        )

    def behind(self, logit_rows: Tensor) -> Tensor:
        """[S + n] rows to compute logits of: those that a step needs anyway, then these."""
        return torch.cat((logit_rows, self.rows.to(logit_rows.device)))

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [S + n, V] of such rows -> those of the first S, and log-probabilities [n] float32 of the tokens."""
        num_own = logits.shape[0] - self.rows.shape[0]
        wanted = logits[num_own:].float()
        token_ids = self.token_ids.to(logits.device).unsqueeze(1)
        return logits[:num_own], wanted.log_softmax(1).gather(1, token_ids).squeeze(1)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
