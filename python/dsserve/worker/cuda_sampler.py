"""The draw of one step on the device: what depends on requests is told by the host, nothing is asked back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dsserve.worker.sampler import (
    _FREQUENCY,
    _MIN_P,
    _PRESENCE,
    _REPETITION,
    _TEMPERATURE,
    _TOP_P,
    Sampler,
    SamplingRow,
    _present,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dsserve_kernels.select import Operators


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """What the draw of S rows is told.

    Attributes:
        numbers: [S, 6] float32, the columns of the sampler's table.
        top_k: [S] int64.
        seed: [S] int64.
        positions: [S] int64 of the drawn tokens.
        penalised: [P] int64, rows with penalties.
        new_prompts: For each penalised row that is drawn for the first time, [V] bool: ids of its prompt.
        biased: [2, b] int64, rows and ids whose logit changes by
        bias: [b] float32.
        banned: [2, e] int64, rows and ids that cannot be drawn yet.
        is_greedy: Whether every row takes its arg-max.
    """

    numbers: Tensor
    top_k: Tensor
    seed: Tensor
    positions: Tensor
    penalised: Tensor
    new_prompts: list[Tensor]
    biased: Tensor
    bias: Tensor
    banned: Tensor
    is_greedy: bool


@dataclass(slots=True)
class _Seen:
    """Device state of a request with penalties: how often each id was drawn [V] int32, ids of its prompt [V] bool."""

    output_counts: Tensor
    in_prompt: Tensor


class DeviceSampler(Sampler):
    """Draws tokens on a device; `inputs` and `draw_placed` are called once a step each, in step order."""

    def __init__(
        self,
        ops: Operators,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        random_seed: int | None,
    ) -> None:
        """See `Sampler`."""
        super().__init__(
            ops, vocab_size=vocab_size, eos_token_ids=eos_token_ids, random_seed=random_seed
        )
        self._seen: WeakKeyDictionary[SamplingRow, _Seen] = WeakKeyDictionary()

    def inputs(self, rows: Sequence[SamplingRow], positions: NDArray[np.int64]) -> DrawInputs:
        """Host tensors of a step's draw, to be copied to the device."""
        penalised = [i for i, row in enumerate(rows) if row.output_counts is not None]
        biased: list[tuple[int, int]] = []
        bias: list[float] = []
        banned: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            if row.bias is not None:
                biased += [(index, token) for token in row.bias[0].tolist()]
                bias += row.bias[1].tolist()
            if row.end_ids is not None and positions[index] < row.first_free_position:
                banned += [(index, token) for token in row.end_ids.tolist()]
        numbers = np.stack([row.numbers for row in rows]) if rows else np.zeros((0, 6), np.float32)
        return DrawInputs(
            numbers=torch.from_numpy(numbers),
            top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int64),
            seed=torch.tensor([row.seed for row in rows], dtype=torch.int64),
            positions=torch.from_numpy(positions),
            penalised=torch.tensor(penalised, dtype=torch.int64),
            new_prompts=[
                _present(rows[i].in_prompt) for i in penalised if rows[i] not in self._seen
            ],
            biased=_pairs(biased),
            bias=torch.tensor(bias, dtype=torch.float32),
            banned=_pairs(banned),
            is_greedy=all(row.numbers[_TEMPERATURE] <= 0 for row in rows),
        )

    def draw_placed(
        self, logits: Tensor, rows: Sequence[SamplingRow], inputs: DrawInputs
    ) -> tuple[Tensor, Tensor]:
        """See `Sampler.draw`; everything happens on the device.

        Args:
            logits: [S, V] float32.
            rows: S states.
            inputs: What `inputs` made of them, on the device.
        """
        broken = ~torch.isfinite(logits).all(1)
        logits = logits.masked_fill(broken.unsqueeze(1), 0.0)
        penalised = [row for row in rows if row.output_counts is not None]
        seen = self._seen_by(penalised, inputs.new_prompts, logits)
        if seen:
            logits[inputs.penalised] = self._penalised(logits[inputs.penalised], seen, inputs)
        if inputs.bias.shape[0]:
            row, token = inputs.biased
            logits[row, token] = logits[row, token] + inputs.bias
        if inputs.banned.shape[1]:
            row, token = inputs.banned
            logits.index_put_((row, token), logits.new_full((), -torch.inf))
        ids = logits.argmax(1) if inputs.is_greedy else self._drawn(logits, inputs)
        ids = ids.masked_fill(broken, 0)
        if seen:
            drawn, one = ids[inputs.penalised], torch.ones_like(seen[0].output_counts[:1])
            for index, state in enumerate(seen):
                state.output_counts.index_add_(0, drawn[index : index + 1], one)
        return ids, broken

    def _seen_by(
        self, rows: Sequence[SamplingRow], new_prompts: Sequence[Tensor], logits: Tensor
    ) -> list[_Seen]:
        """The state of rows with penalties; of new ones it begins with the prompts that came with the step."""
        prompts = iter(new_prompts)
        for row in rows:
            if row not in self._seen:
                counts = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
                self._seen[row] = _Seen(counts, next(prompts).clone())
        return [self._seen[row] for row in rows]

    def _penalised(self, logits: Tensor, seen: Sequence[_Seen], inputs: DrawInputs) -> Tensor:
        numbers = inputs.numbers[inputs.penalised].unsqueeze(2)
        result: Tensor = self._ops.apply_penalties(
            logits,
            torch.stack([state.output_counts for state in seen]),
            torch.stack([state.in_prompt for state in seen]),
            numbers[:, _REPETITION],
            numbers[:, _PRESENCE],
            numbers[:, _FREQUENCY],
        )
        return result

    def _drawn(self, logits: Tensor, inputs: DrawInputs) -> Tensor:
        numbers = inputs.numbers
        result: Tensor = self._ops.sample(
            logits,
            numbers[:, _TEMPERATURE],
            inputs.top_k,
            numbers[:, _TOP_P],
            numbers[:, _MIN_P],
            inputs.seed,
            inputs.positions,
        )
        return result


def _pairs(pairs: list[tuple[int, int]]) -> Tensor:
    """[2, n] int64."""
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous()
