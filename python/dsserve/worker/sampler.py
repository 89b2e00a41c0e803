"""Sampling state of the running requests, and the draw of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        draft_len: Draft tokens it wants at most; None = what the server gives.
        simulated_len: Accepted drafts and the token behind them, on average, for benchmarks; None = the truth.
    """

    def __init__(
        self,
        request: AdmittedRequest,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int,
        device: torch.device,
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
        self.top_k = min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size
        self.seed = seed
        self.prompt_len = len(request.prompt_token_ids)
        self.draft_len = request.draft_len
        self.simulated_len = request.simulated_len
        self.bias = _bias_tensors(sampling.logit_bias, device)
        self.first_free_position = self.prompt_len + request.min_new_tokens
        ends = set(request.stop_token_ids) | (set() if request.ignore_eos else set(eos_token_ids))
        self.end_ids = (
            torch.tensor(sorted(ends), dtype=torch.int64).to(device, non_blocking=True)
            if request.min_new_tokens
            else None
        )
        self.output_counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        if (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        ):
            self.output_counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            in_prompt[torch.from_numpy(request.prompt_token_ids.astype(np.int64))] = True
            self.in_prompt = in_prompt.to(device, non_blocking=True)

    @property
    def changes_logits(self) -> bool:
        """Whether the row needs more than temperature and truncation."""
        return self.bias is not None or self.output_counts is not None or self.end_ids is not None


def _bias_tensors(
    bias: dict[int, float] | None, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if not bias:
        return None
    ids = torch.tensor(list(bias), dtype=torch.int64)
    values = torch.tensor(list(bias.values()), dtype=torch.float32)
    return ids.to(device, non_blocking=True), values.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The sampled requests of a step: what the operators read of them, on the device.

    Attributes:
        rows: S states.
        numbers: [S, 6] float32.
        top_k: [S] int64.
        seed: [S] int64.
        is_greedy: Whether every request takes its arg-max.
        penalised: [P] those of the requests that have penalties, None without any.
        simulated: [S] float64 accepted drafts that benchmarks want on average, NaN = the truth; None without any.
    """

    rows: Sequence[SamplingRow]
    numbers: Tensor
    top_k: Tensor
    seed: Tensor
    is_greedy: bool
    penalised: Tensor | None
    simulated: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], device: torch.device) -> SamplingTable:
        """Gather the constants, on their way to the device."""

        def put(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        numbers = np.zeros((len(rows), 6), dtype=np.float32)
        for index, row in enumerate(rows):
            numbers[index] = row.numbers
        penalised = [index for index, row in enumerate(rows) if row.output_counts is not None]
        lengths = [row.simulated_len for row in rows]
        has_simulated = any(length is not None for length in lengths)
        means = [math.nan if length is None else length - 1 for length in lengths]
        return cls(
            rows,
            torch.from_numpy(numbers).to(device, non_blocking=True),
            put([row.top_k for row in rows], torch.int64),
            put([row.seed for row in rows], torch.int64),
            bool((numbers[:, _TEMPERATURE] <= 0).all()),
            put(penalised, torch.int64) if penalised else None,
            put(means, torch.float64) if has_simulated else None,
        )

    @property
    def temperature(self) -> Tensor:
        """[S] float32; 0 = greedy."""
        return self.numbers[:, _TEMPERATURE]

    def truncation(self, request: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top-k, top-p and min-p of rows whose requests are `request` [R]."""
        numbers = self.numbers[request]
        return (
            numbers[:, _TEMPERATURE],
            self.top_k[request],
            numbers[:, _TOP_P],
            numbers[:, _MIN_P],
        )


@dataclass(frozen=True, slots=True)
class RunRows:
    """The logit rows of a step by request: R rows, S requests with up to K of them, each behind the one before.

    Attributes:
        request: [R] request of each row, 0..S-1.
        positions: [R] absolute position of the token that each row's logits are for.
        index: [S, K] rows of each request in order, -1 = none.
        drafts: [S, K - 1] ids that the rows after the first stand behind.
    """

    request: Tensor
    positions: Tensor
    index: Tensor
    drafts: Tensor

    @classmethod
    def single(cls, positions: Tensor) -> RunRows:
        """One row per request."""
        request = torch.arange(positions.shape[0], device=positions.device)
        index = request.unsqueeze(1)
        return cls(request, positions, index, index[:, :0])

    def padded(self, values: Tensor) -> Tensor:
        """[R, ..] -> [S, K, ..]; what stands where no row is means nothing."""
        return values[self.index.clamp_min(0)]


class Sampler:
    """Draws tokens; all methods but `admit` and `release` run on the stream, in step order."""

    def __init__(
        self,
        ops: Operators,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        random_seed: int | None,
        device: torch.device | None = None,
    ) -> None:
        """An empty table; `random_seed` seeds requests that bring no seed; `device` (CPU) is where logits are."""
        self._ops = ops
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._random = np.random.default_rng(random_seed)
        self._device = device or torch.device("cpu")
        self._rows: dict[int, SamplingRow] = {}

    def admit(self, requests: Iterable[AdmittedRequest]) -> None:
        """Learn the constants of new requests."""
        for request in requests:
            seed = request.sampling.seed
            if seed is None:
                seed = int(self._random.integers(0, 2**63 - 1))
            self._rows[request.request_id] = SamplingRow(
                request, self._vocab_size, self._eos, seed, self._device
            )

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
        """Draw one token per request, and count it.

        Args:
            logits: [S, V] float32.
            rows: S states.
            positions: [S] absolute position of each drawn token.

        Returns:
            ids [S] int64 and broken [S] bool: rows whose logits are not all numbers (their id is 0).
        """
        table = SamplingTable.of(rows, logits.device)
        runs = RunRows.single(torch.from_numpy(positions).to(logits.device))
        ids, broken = self.draw_rows(logits, table, runs)
        self.count(table, ids.unsqueeze(1), torch.ones_like(ids))
        return ids, broken

    def draw_rows(
        self, logits: Tensor, table: SamplingTable, runs: RunRows
    ) -> tuple[Tensor, Tensor]:
        """Draw one token per row, as if the drafts before a row were output; nothing is counted.

        Args:
            logits: [R, V] float32.
            table: The requests.
            runs: Which rows are whose.

        Returns:
            ids [R] int64 and broken [R] bool, see `draw`.
        """
        logits, broken = self._prepared(logits, table, runs)
        if table.is_greedy:
            return logits.argmax(1).masked_fill(broken, 0), broken
        seed = table.seed[runs.request]
        ids: Tensor = self._ops.sample(
            logits, *table.truncation(runs.request), seed, runs.positions
        )
        return ids.masked_fill(broken, 0), broken

    def distributions(
        self, logits: Tensor, table: SamplingTable, runs: RunRows
    ) -> tuple[Tensor, Tensor]:
        """What `draw_rows` draws from: [R, V] float64, and broken [R]."""
        logits, broken = self._prepared(logits, table, runs)
        rows: Tensor = self._ops.sampling_distribution(logits, *table.truncation(runs.request))
        return rows, broken

    def count(self, table: SamplingTable, ids: Tensor, num_ids: Tensor) -> None:
        """Add output ids [S, K], of each request the first `num_ids` [S], to what penalties count."""
        for index, row in enumerate(table.rows):
            if row.output_counts is not None:
                is_new = torch.arange(ids.shape[1], device=ids.device) < num_ids[index]
                row.output_counts.scatter_add_(0, ids[index], is_new.to(torch.int32))

    def _prepared(
        self, logits: Tensor, table: SamplingTable, runs: RunRows
    ) -> tuple[Tensor, Tensor]:
        """Logits after penalties, bias and the ban of end tokens before `min_new_tokens`; broken rows are zeros."""
        broken = ~torch.isfinite(logits).all(1)
        logits = logits.masked_fill(broken.unsqueeze(1), 0.0)
        if any(row.changes_logits for row in table.rows):
            # The row behind the last takes what is written for rows that are not there.
            spare = torch.nn.functional.pad(logits, (0, 0, 0, 1))
            index = torch.where(runs.index >= 0, runs.index, logits.shape[0])
            self._penalise(spare, table, index, runs.drafts)
            positions = torch.nn.functional.pad(runs.positions, (0, 1))
            for request, row in enumerate(table.rows):
                _bias_and_ban(spare, row, index[request], positions)
            logits = spare[:-1]
        return logits, broken

    def _penalise(
        self, logits: Tensor, table: SamplingTable, index: Tensor, drafts: Tensor
    ) -> None:
        """Penalties of each row over the output before it, drafts included."""
        which = table.penalised
        if which is None:
            return
        rows = [row for row in table.rows if row.output_counts is not None]
        index, drafts = index[which], drafts[which]
        width, vocab = index.shape[1], logits.shape[1]
        before = torch.zeros(len(rows), width, vocab, dtype=torch.int32, device=logits.device)
        if width > 1:
            ones = torch.ones_like(drafts, dtype=torch.int32).unsqueeze(2)
            before[:, 1:].scatter_(2, drafts.unsqueeze(2), ones)
        counts = before.cumsum(1, dtype=torch.int32)
        counts += torch.stack([_present(row.output_counts) for row in rows]).unsqueeze(1)
        seen = torch.stack([_present(row.in_prompt) for row in rows])
        numbers = table.numbers[which].repeat_interleave(width, dim=0).unsqueeze(2)
        changed = self._ops.apply_penalties(
            logits[index.view(-1)],
            counts.view(-1, vocab),
            seen.repeat_interleave(width, dim=0),
            numbers[:, _REPETITION],
            numbers[:, _PRESENCE],
            numbers[:, _FREQUENCY],
        )
        logits[index.view(-1)] = changed


def _bias_and_ban(logits: Tensor, row: SamplingRow, index: Tensor, positions: Tensor) -> None:
    """Bias of one request's rows `index` [K], and no end token before its first free position."""
    index = index.unsqueeze(1)
    if row.bias is not None:
        ids, values = row.bias
        logits[index, ids] += values
    if row.end_ids is not None:
        is_early = positions[index] < row.first_free_position
        ends = logits[index, row.end_ids]
        logits[index, row.end_ids] = ends.masked_fill(is_early, -torch.inf)


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a row with penalties has no counts")
    return tensor
