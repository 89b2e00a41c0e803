"""How drafts of sampled requests are drawn and accepted: three ways, all exact (dspark.md section 3).

`shared-noise` (the default): draft and target draw by the same noise, that of (seed, position, id). A draft is accepted
if it is what the target draws; the output then is what plain decoding draws with that seed, bit for bit, whatever was
drafted, verified or scheduled, alone or in a batch. It needs nothing of the drafts but their ids.

`rejection`: the textbook way. Drafts are drawn from q = softmax(logits / temperature), accepted with probability
min(1, p / q), and followed by a draw from the residual. It accepts a few more drafts, but the output of a seed depends
on how many drafts each round had, and q is needed: the logits of every slot's drafts are kept, G x V floats each.

`greedy-draft`: drafts are arg-maxima, q is one-hot; nothing is kept.

Block verification goes with `rejection` and `greedy-draft`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dsserve_kernels.reference.speculative import one_hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsserve.worker.relay import Relay
    from dsserve.worker.sampler import RunRows, Sampler, SamplingTable
    from dsserve_kernels.select import Operators


@dataclass(frozen=True, slots=True)
class Round:
    """A step's requests at their anchors; S requests that sample.

    Attributes:
        slots: [S].
        anchor: [S] position of the anchor.
        num_drafts: [S] drafts to verify.
        runs: The rows of logits, with the drafts [S, K - 1] before them.
    """

    slots: Tensor
    anchor: Tensor
    num_drafts: Tensor
    runs: RunRows


@dataclass(frozen=True, slots=True)
class Accepted:
    """The runs that a step adds to its requests.

    Attributes:
        count: [S] accepted drafts.
        ids: [S, K] accepted drafts, then the token behind them; what follows means nothing.
        is_broken: [S] bool, some logits that decided were no numbers.
    """

    count: Tensor
    ids: Tensor
    is_broken: Tensor

    @property
    def newest(self) -> Tensor:
        """[S] the token behind the accepted drafts."""
        return self.ids.gather(1, self.count.unsqueeze(1)).squeeze(1)


class Acceptance(Protocol):
    """A way to draw drafts and to accept them. Everything runs on the stream."""

    def choose(
        self, table: SamplingTable, request: Tensor, anchor: Tensor
    ) -> Callable[[int, Tensor], Tensor]:
        """Draws drafts of the requests `request` [B] of the table, whose anchors lie at `anchor` [B]."""
        ...

    def accept(self, logits: Tensor, table: SamplingTable, at: Round) -> Accepted:
        """Accept drafts and draw the token behind them; logits [R, V]."""
        ...


def build_acceptance(
    name: str, sampler: Sampler, ops: Operators, relay: Relay, *, is_block: bool
) -> Acceptance:
    """The way called `name` (`--speculative-dspark-sampling`), with block verification or not."""
    if name == "shared-noise":
        return SharedNoise(sampler, ops)
    return Rejection(sampler, ops, relay, is_block=is_block)


class SharedNoise:
    """Drafts that the target draws too are accepted."""

    def __init__(self, sampler: Sampler, ops: Operators) -> None:
        """Keep what it needs."""
        self._sampler, self._ops = sampler, ops

    def choose(
        self, table: SamplingTable, request: Tensor, anchor: Tensor
    ) -> Callable[[int, Tensor], Tensor]:
        """See `Acceptance.choose`: truncated as the target's draws are, so that drafts are among them."""
        truncation, seed = table.truncation(request), table.seed[request]

        def draw(place: int, logits: Tensor) -> Tensor:
            ids: Tensor = self._ops.sample(logits, *truncation, seed, anchor + 1 + place)
            return ids

        return draw

    def accept(self, logits: Tensor, table: SamplingTable, at: Round) -> Accepted:
        """See `Acceptance.accept`."""
        drawn, broken = self._sampler.draw_rows(logits, table, at.runs)
        own = at.runs.padded(drawn)
        count: Tensor = self._ops.accept_draws(at.runs.drafts, own, at.num_drafts)
        return _run(at, count, own, at.runs.padded(broken))


class Rejection:
    """Speculative sampling, row by row or by block."""

    def __init__(self, sampler: Sampler, ops: Operators, relay: Relay, *, is_block: bool) -> None:
        """Without `relay.draft_logits` drafts are arg-maxima."""
        self._sampler, self._ops, self._relay = sampler, ops, relay
        self._accept = ops.accept_block if is_block else ops.accept_sampled

    def choose(
        self, table: SamplingTable, request: Tensor, anchor: Tensor
    ) -> Callable[[int, Tensor], Tensor]:
        """See `Acceptance.choose`."""
        if self._relay.draft_logits is None:
            return lambda _, logits: logits.argmax(1)
        temperature, seed = table.temperature[request], table.seed[request]

        def draw(place: int, logits: Tensor) -> Tensor:
            ids: Tensor = self._ops.draw_drafts(logits, temperature, seed, anchor, place)
            return ids

        return draw

    def accept(self, logits: Tensor, table: SamplingTable, at: Round) -> Accepted:
        """See `Acceptance.accept`. Where no request can have drafts, tokens are drawn as ever."""
        drafts = at.runs.drafts
        if drafts.shape[1] == 0:
            drawn, broken = self._sampler.draw_rows(logits, table, at.runs)
            own = at.runs.padded(drawn)
            return _run(at, torch.zeros_like(at.num_drafts), own, at.runs.padded(broken))
        rows, broken = self._sampler.distributions(logits, table, at.runs)
        kept = self._relay.draft_logits
        draft = (
            one_hot(drafts, logits.shape[1])
            if kept is None
            else self._ops.draft_distribution(kept[at.slots], table.temperature)
        )
        count, bonus = self._accept(
            drafts, at.runs.padded(rows), draft, at.num_drafts, table.seed, at.anchor
        )
        width = drafts.shape[1] + 1
        return _run(at, count, bonus.unsqueeze(1).expand(-1, width), at.runs.padded(broken))


def _run(at: Round, count: Tensor, bonus: Tensor, broken: Tensor) -> Accepted:
    """Accepted drafts, then of `bonus` [S, K] the token behind so many; `broken` [S, K]."""
    drafts = torch.nn.functional.pad(at.runs.drafts, (0, 1))
    place = torch.arange(drafts.shape[1], device=drafts.device)
    limit = count.unsqueeze(1)
    ids = torch.where(place < limit, drafts, bonus)
    return Accepted(count, ids, (broken & (place <= limit)).any(1))


def simulated(accepted: Accepted, at: Round, table: SamplingTable, ops: Operators) -> Accepted:
    """The same with lengths of a benchmark, where requests ask for it (`simulate_accept_len`)."""
    if table.simulated is None:
        return accepted
    is_simulated = ~table.simulated.isnan()
    mean = table.simulated.nan_to_num(0.0)
    count = ops.simulate_accepted(mean, at.num_drafts, table.seed, at.anchor)
    count = torch.where(is_simulated, count, accepted.count)
    drafts = torch.nn.functional.pad(at.runs.drafts, (0, 1))
    place = torch.arange(drafts.shape[1], device=drafts.device)
    ids = torch.where(place < count.unsqueeze(1), drafts, accepted.ids)
    return Accepted(count, ids, accepted.is_broken)
