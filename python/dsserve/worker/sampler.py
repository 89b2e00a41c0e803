"""Sampling state of the running requests, and the draw of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dsserve.worker.base import AdmittedRequest
    from dsserve_kernels.select import Operators

#: Columns of the parameter table.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)


class SamplingRow:
    """Constants of one request, and the token counts its penalties need.

    Attributes:
        numbers: [6] float32, the columns above.
        top_k: Vocabulary size = no limit.
        seed: Of the counter-based noise.
        prompt_len: Tokens of the prompt; output token i is drawn for position prompt_len + i.
    """

    def __init__(
        self, request: AdmittedRequest, vocab_size: int, eos_token_ids: Sequence[int], seed: int
    ) -> None:
        sampling = request.sampling
        self.numbers = np.array(
            [
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            ],
            dtype=np.float32,
        )
        self.top_k = sampling.top_k if sampling.top_k > 0 else vocab_size
        self.seed = seed
        self.prompt_len = len(request.prompt_token_ids)
        self.bias = _bias_tensors(sampling.logit_bias)
        self.first_free_position = self.prompt_len + request.min_new_tokens
        ends = set(request.stop_token_ids) | (set() if request.ignore_eos else set(eos_token_ids))
        self.end_ids = (
            torch.tensor(sorted(ends), dtype=torch.int64) if request.min_new_tokens else None
        )
        self.output_counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        if (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        ):
            self.output_counts = torch.zeros(vocab_size, dtype=torch.int32)
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self.in_prompt[torch.from_numpy(request.prompt_token_ids.astype(np.int64))] = True

    @property
    def changes_logits(self) -> bool:
        """Whether the row needs more than temperature and truncation."""
        return self.bias is not None or self.output_counts is not None or self.end_ids is not None


def _bias_tensors(bias: dict[int, float] | None) -> tuple[Tensor, Tensor] | None:
    if not bias:
        return None
    ids = torch.tensor(list(bias), dtype=torch.int64)
    return ids, torch.tensor(list(bias.values()), dtype=torch.float32)


class Sampler:
    """Draws tokens; all methods but `admit` and `release` run on the stream, in step order."""

    def __init__(
        self,
        ops: Operators,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        random_seed: int | None,
    ) -> None:
        """An empty table; `random_seed` seeds requests that bring no seed."""
        self._ops = ops
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._random = np.random.default_rng(random_seed)
        self._rows: dict[int, SamplingRow] = {}

    def admit(self, requests: Iterable[AdmittedRequest]) -> None:
        """Learn the constants of new requests."""
        for request in requests:
            seed = request.sampling.seed
            if seed is None:
                seed = int(self._random.integers(0, 2**63 - 1))
            self._rows[request.request_id] = SamplingRow(request, self._vocab_size, self._eos, seed)

    def release(self, request_ids: Iterable[int]) -> None:
        """Forget ended requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def rows_of(self, request_ids: NDArray[np.uint64]) -> list[SamplingRow]:
        """The state of a step's sampled requests; taken at launch, so that a later release does no harm."""
        return [self._rows[int(request_id)] for request_id in request_ids]

    def draw(
        self, logits: Tensor, rows: Sequence[SamplingRow], positions: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Draw one token per row.

        Args:
            logits: [S, V] float32.
            rows: S states.
            positions: [S] absolute position of each drawn token.

        Returns:
            ids [S] int64 and broken [S] bool: rows whose logits are not all numbers (their id is 0).
        """
        broken = ~torch.isfinite(logits).all(1)
        logits = logits.masked_fill(broken.unsqueeze(1), 0.0)
        if any(row.changes_logits for row in rows):
            logits = self._changed(logits, rows, positions)
        numbers = torch.from_numpy(np.stack([row.numbers for row in rows]))
        ids: Tensor = self._ops.sample(
            logits,
            numbers[:, _TEMPERATURE],
            torch.tensor([row.top_k for row in rows]),
            numbers[:, _TOP_P],
            numbers[:, _MIN_P],
            torch.tensor([row.seed for row in rows]),
            torch.from_numpy(positions),
        )
        ids = ids.masked_fill(broken, 0)
        for index, row in enumerate(rows):
            if row.output_counts is not None:
                row.output_counts[ids[index]] += 1
        return ids, broken

    def _changed(
        self, logits: Tensor, rows: Sequence[SamplingRow], positions: NDArray[np.int64]
    ) -> Tensor:
        """Logits after penalties, bias and the ban of end tokens before `min_new_tokens`."""
        penalised = [i for i, row in enumerate(rows) if row.output_counts is not None]
        if penalised:
            numbers = torch.from_numpy(np.stack([rows[i].numbers for i in penalised])).unsqueeze(2)
            counts = torch.stack([_present(rows[i].output_counts) for i in penalised])
            seen = torch.stack([_present(rows[i].in_prompt) for i in penalised])
            logits[penalised] = self._ops.apply_penalties(
                logits[penalised],
                counts,
                seen,
                numbers[:, _REPETITION],
                numbers[:, _PRESENCE],
                numbers[:, _FREQUENCY],
            )
        for index, row in enumerate(rows):
            if row.bias is not None:
                logits[index, row.bias[0]] += row.bias[1]
            if row.end_ids is not None and positions[index] < row.first_free_position:
                logits[index, row.end_ids] = -torch.inf
        return logits


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a row with penalties has no counts")
    return tensor
