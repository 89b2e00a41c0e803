"""How many drafts a step verifies: survival, budget and allocation (dspark.md section 4). Host code, numpy only.

A draft's survival is the chance that it and all drafts before it are accepted. A step's gain is the expected number of
tokens; its price comes from a cost model. Which draft is verified must not depend on what the drafts turned out to be,
or the output distribution changes: hence the early stop of the synchronous rule, and hence a budget that only looks
at drafts that have been verified already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float = NDArray[np.float64]
    Int = NDArray[np.int64]


#: No step is shorter: keeps a table with zeros from dividing by them.
_MIN_S = 1e-9


class StepCost(Protocol):
    """Price of a step."""

    def step_seconds(self, num_requests: int, num_tokens: Int) -> Float:
        """Seconds of a step for each of several token counts."""
        ...


class LearningCost(StepCost, Protocol):
    """A price that is learnt from steps."""

    def probe(self, num_requests: int, num_drafts: int) -> int | None:
        """Drafts to verify instead of the best number; must not depend on drafts or confidences."""
        ...


def survivals(confidences: NDArray[np.floating]) -> Float:
    """Chance [B, gamma] that each draft and all before it are accepted, from the drafts' confidences.

    A confidence that is NaN, of a request whose numbers broke, counts as 0 and so harms no other request.
    """
    return np.cumprod(np.nan_to_num(confidences, nan=0.0), axis=1, dtype=np.float64)


def ranked(survival: Float, limits: Int) -> tuple[Int, Int]:
    """Drafts in the order in which they are worth verifying.

    Args:
        survival: [B, gamma], not increasing along a row.
        limits: [B] drafts of each request that may be verified.

    Returns:
        Requests and positions, by descending survival; ties by position, then request. So a draft never comes before
        its predecessors, and its own value has no say in whether it is chosen.
    """
    requests, positions = np.nonzero(np.arange(survival.shape[1]) < limits[:, None])
    order = np.lexsort((requests, positions, -survival[requests, positions]))
    return requests[order], positions[order]


def allocate(survival: Float, limits: Int, budget: int) -> Int:
    """Drafts [B] to verify of each request: the `budget` likeliest of all; see `ranked`."""
    requests, _ = ranked(survival, limits)
    return np.bincount(requests[: max(budget, 0)], minlength=len(survival))


def best_budget(survival: Float, limits: Int, cost: StepCost) -> int:
    """The number of drafts with the most expected tokens per second; of equal ones the largest.

    A maximum over all counts, because step times have cliffs. Lossless only with survivals of past drafts.
    """
    throughput = _throughput(survival, limits, cost)
    return int(len(throughput) - 1 - np.argmax(throughput[::-1]))


def allocate_synchronously(survival: Float, limits: Int, cost: StepCost) -> Int:
    """Drafts [B] to verify, from the survivals of the very drafts: admits one at a time while throughput grows.

    Stopping at the first admission that does not pay makes each decision depend on earlier positions alone
    (Algorithm 1 of the DSpark paper); going on to the best count would bias the output.
    """
    throughput = _throughput(survival, limits, cost)
    stops = np.flatnonzero(throughput[1:] <= throughput[:-1])
    return allocate(survival, limits, int(stops[0]) if len(stops) else len(throughput) - 1)


def _throughput(survival: Float, limits: Int, cost: StepCost) -> Float:
    """Expected tokens per second with 0, 1, .. drafts verified; every request brings its anchor."""
    requests, positions = ranked(survival, limits)
    count = len(survival)
    gained = np.concatenate(([0.0], np.cumsum(survival[requests, positions])))
    num_tokens = count + np.arange(len(gained))
    result: Float = (count + gained) / np.maximum(cost.step_seconds(count, num_tokens), _MIN_S)
    return result


class VerifyBudget:
    """The budget of each verify step, from confidences of drafts that an earlier step verified.

    Per slot the two newest observations are kept. The drafts that a step verifies come from the request's step
    before, so only what came from still earlier steps is used, whether or not the newest result is already known:
    the budget is the same with and without overlap. A request without such an observation counts as certain.
    """

    def __init__(self, cost: LearningCost, *, gamma: int, num_slots: int) -> None:
        """Nothing observed yet.

        Args:
            cost: Price of steps.
            gamma: Drafts of a block.
            num_slots: Slots, the padding slot included.
        """
        self._cost = cost
        # Newest observation first. Step ids start at 1 or later; -1: none.
        self._survival = np.ones((2, num_slots, gamma))
        self._step = np.full((2, num_slots), -1, dtype=np.int64)
        self._owner = np.zeros((2, num_slots), dtype=np.uint64)
        self._launched = np.full(num_slots, -1, dtype=np.int64)
        self._launched_owner = np.zeros(num_slots, dtype=np.uint64)

    def observe(
        self,
        step_id: int,
        slots: Int,
        owners: NDArray[np.uint64],
        confidences: NDArray[np.floating],
    ) -> None:
        """Learn the confidences of the drafts that a step proposed; results come in the order of their steps.

        Args:
            step_id: The step.
            slots: [B].
            owners: [B] ids of the requests in them.
            confidences: [B, gamma], each draft's chance given that those before it are accepted.
        """
        for table in (self._survival, self._step, self._owner):
            table[1, slots] = table[0, slots]
        self._survival[0, slots] = survivals(confidences)
        self._step[0, slots] = step_id
        self._owner[0, slots] = owners

    def budget(
        self, step_id: int, slots: Int, owners: NDArray[np.uint64], limits: Int | None = None
    ) -> int:
        """Drafts that a verify step verifies in all; call it once for each, in launch order.

        Args:
            step_id: The step about to be launched.
            slots: [B] of its requests.
            owners: [B] ids of its requests.
            limits: [B] drafts that may be verified; all of them if None.
        """
        known = self._known(slots, owners)
        self._launched[slots], self._launched_owner[slots] = step_id, owners
        if limits is None:
            limits = np.full(len(slots), known.shape[1], dtype=np.int64)
        probe = self._cost.probe(len(slots), int(limits.sum()))
        return best_budget(known, limits, self._cost) if probe is None else probe

    def _known(self, slots: Int, owners: NDArray[np.uint64]) -> Float:
        """Survivals [B, gamma] of the newest drafts older than the current ones; 1 where there are none."""
        before = np.where(self._launched_owner[slots] == owners, self._launched[slots], -1)
        is_old = (self._step[:, slots] < before) & (self._step[:, slots] >= 0)
        is_old &= self._owner[:, slots] == owners
        newest, other = self._survival[:, slots]
        known: Float = np.where(is_old[1][:, None], other, 1.0)
        return np.where(is_old[0][:, None], newest, known)
