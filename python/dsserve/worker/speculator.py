"""Steps with DSpark drafts: verify, accept, commit and draft again, all on the stream (dspark.md section 2)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from dsserve.kv.layout import TAIL_RING, TOKEN_RING, WINDOW_SLACK
from dsserve.models.deepseek_v4.draft_context import history_rows
from dsserve.worker.accept import Accepted, Round, build_acceptance, simulated
from dsserve.worker.base import (
    PHASE_VERIFY,
    STATUS_NAN,
    STATUS_OK,
    StepDrafts,
    StepResult,
)
from dsserve.worker.relay import Relay, ring_rows
from dsserve.worker.sampler import RunRows, SamplingTable
from dsserve.worker.verify import DeviceBatchBuilder, StepInputs
from dsserve.worker.verify_budget import StepLesson, VerifyPlanner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from dsserve.kv.device import DevicePools
    from dsserve.models.batch import ForwardBatch
    from dsserve.models.deepseek_v4.draft import Proposal
    from dsserve.worker.batch import PlanView
    from dsserve.worker.runner import Runner
    from dsserve.worker.sampler import Sampler, SamplingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """How drafts are made and verified.

    Attributes:
        gamma: Drafts of a block.
        verify: `static`, `cap` or `compact`.
        sampling: See `worker/accept.py`.
        is_block: Block verification.
        temperatures: [gamma] of the confidences; empty = 1.
        cost_table: What steps cost; None = learn it.
    """

    gamma: int
    verify: str = "static"
    sampling: str = "shared-noise"
    is_block: bool = False
    temperatures: tuple[float, ...] = ()
    cost_table: Path | None = None

    @property
    def is_scheduled(self) -> bool:
        """Whether confidences decide how many drafts are verified."""
        return self.verify != "static"


class Drafts(Protocol):
    """What proposes drafts: `DraftModel`, or a stand-in."""

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context_index: Tensor,
        *,
        gamma: int,
        pools: DevicePools,
        choose: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Proposal:
        """See `DraftModel.propose`."""
        ...


def longest_block(lookback: int) -> int:
    """Drafts that the rings have room for beside the committed rows that the next step needs."""
    return min(WINDOW_SLACK, TAIL_RING - 1, TOKEN_RING - lookback)


@dataclass(frozen=True, slots=True)
class SpeculativeStep:
    """The host's part of a step: tensors that are on their way to the device.

    Attributes:
        plan: The plan.
        page_deltas: [N, 3].
        batch: Of a step whose positions the host knows; None otherwise.
        inputs: What the device lays the step out from.
        table: The sampled requests.
        floors: [S] `tail_floor` of the sampled requests.
        limits: [B] drafts that the plan gives each request.
        drafting: [D] sampled requests, 0..S-1, that get new drafts.
        drafting_requests: The same among all requests of the plan, on the host.
        budget: Drafts to verify in all; None = those of the plan.
    """

    plan: PlanView
    page_deltas: Tensor
    batch: ForwardBatch | None
    inputs: StepInputs
    table: SamplingTable
    floors: Tensor
    limits: Tensor
    drafting: Tensor
    drafting_requests: NDArray[np.int64]
    budget: int | None


@dataclass(frozen=True, slots=True)
class SpeculativeResult:
    """What a step leaves for the host; tensors on the device.

    Attributes:
        accepted: The runs of the sampled requests.
        num_drafts: [S] drafts that were verified.
        confidences: [D, gamma] of the new drafts, for the requests in `SpeculativeStep.drafting`.
    """

    accepted: Accepted
    num_drafts: Tensor
    confidences: Tensor


class Speculator:
    """Runs steps of a model with a draft head."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        draft: Drafts,
        settings: SpeculationSettings,
        device: torch.device,
        inputs_on: torch.device | None = None,
    ) -> None:
        """Allocate the relay buffers.

        Args:
            runner: Model and pools.
            sampler: Draws the target's tokens.
            draft: The model's draft head.
            settings: How.
            device: Where everything is.
            inputs_on: Where `prepare` leaves its tensors, if somebody else brings them to the device.
        """
        config, ops = runner.model.config, runner.model.ops
        keeps_logits = settings.sampling == "rejection"
        self._runner, self._sampler, self._draft = runner, sampler, draft
        self._ops, self._inputs_on = ops, inputs_on or device
        self.settings = settings
        self.relay = Relay(
            config,
            num_slots=runner.sizes.num_slots,
            num_columns=runner.sizes.num_columns,
            gamma=settings.gamma,
            keeps_logits=keeps_logits,
            device=device,
        )
        self._window = config.sliding_window
        temperatures = settings.temperatures or (1.0,) * settings.gamma
        self._temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self.planner = (
            VerifyPlanner(
                gamma=settings.gamma,
                num_slots=runner.sizes.num_slots,
                table=settings.cost_table,
            )
            if settings.is_scheduled
            else None
        )
        self._builder = DeviceBatchBuilder(config, runner.pools.layout, self.relay)
        self.acceptance = build_acceptance(
            settings.sampling, sampler, ops, self.relay, is_block=settings.is_block
        )

    def use_draft(self, draft: Drafts) -> None:
        """Draft by something else than the model's head (tests, comparisons)."""
        self._draft = draft

    def prepare(self, plan: PlanView, rows: list[SamplingRow]) -> SpeculativeStep:
        """The host's part of a step, in plan order.

        Args:
            plan: The plan.
            rows: Its sampled requests.
        """

        def put(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(self._inputs_on, non_blocking=True)

        batch = None
        if plan.continues.any():
            self._runner.write_pages(plan)
        else:
            batch = self._runner.prepare(plan)
        wants = np.array([row.draft_len != 0 for row in rows], dtype=np.bool_)
        return SpeculativeStep(
            plan=plan,
            page_deltas=put(plan.page_deltas),
            batch=batch,
            inputs=StepInputs.of(plan, self._inputs_on),
            table=SamplingTable.of(rows, self._inputs_on),
            floors=put(plan.tail_floor[plan.samples]),
            limits=put(plan.draft_len),
            drafting=put(np.flatnonzero(wants)),
            drafting_requests=np.flatnonzero(plan.samples)[wants],
            budget=None if self.planner is None else self.planner.budget_of(plan),
        )

    def run(self, step: SpeculativeStep) -> SpeculativeResult:
        """The device's part: forward, acceptance, commit, new drafts. Nothing is read back."""
        relay, pools = self.relay, self._runner.pools
        relay.write_pages(step.page_deltas)
        inputs, limits = step.inputs, step.limits
        if step.budget is not None:
            limits = self._ops.allocate_drafts(
                relay.survival[inputs.slots], step.limits, step.budget
            )
            if self.settings.verify == "compact":
                inputs = inputs.with_drafts(limits, step.budget)
        batch = step.batch if step.batch is not None else self._builder.build(inputs)
        logits = self._runner.forward(batch)
        at = self._round(inputs, limits)
        accepted = self.acceptance.accept(logits, step.table, at)
        accepted = simulated(accepted, at, step.table, self._ops)
        self._sampler.count(step.table, accepted.ids, accepted.count + 1)
        committed = at.anchor + 1 + accepted.count
        relay.committed_len[at.slots] = committed
        pools.token_ring[ring_rows(at.slots, committed)] = accepted.newest
        confidences = self._propose(step, at.slots, committed, accepted.newest)
        return SpeculativeResult(accepted, at.num_drafts, confidences)

    def fetch(
        self,
        step: SpeculativeStep,
        result: SpeculativeResult,
        started_s: float,
        finished_s: float | None = None,
    ) -> StepResult:
        """The step's result on the host, runs one after another; waits for the device.

        Args:
            step: The step.
            result: From `run`.
            started_s: When the device began.
            finished_s: When it ended; None = when this call has everything.
        """
        plan, accepted = step.plan, result.accepted
        sampled = np.flatnonzero(plan.samples)
        ids = accepted.ids.to(torch.int32).cpu().numpy()
        counts = accepted.count.cpu().numpy()
        is_broken = accepted.is_broken.cpu().numpy()
        verified = np.zeros(plan.num_requests, dtype=np.uint32)
        verified[sampled] = result.num_drafts.cpu().numpy()
        taken = np.zeros_like(verified)
        taken[sampled] = counts
        num_ids = np.zeros_like(verified)
        num_ids[sampled] = counts + 1
        status = np.full(plan.num_requests, STATUS_OK, dtype=np.uint8)
        status[sampled[is_broken]] = STATUS_NAN
        confidences = result.confidences.cpu().numpy()
        finished_s = time.monotonic() if finished_s is None else finished_s
        if self.planner is not None:
            is_ragged = step.budget is not None and self.settings.verify == "compact"
            self.planner.finished(
                StepLesson(
                    plan,
                    plan.num_requests + int(verified.sum()) if is_ragged else len(plan.positions),
                    finished_s - started_s,
                    step.drafting_requests,
                    confidences,
                )
            )
        return StepResult(
            step_id=plan.step_id,
            token_ids=ids[np.arange(ids.shape[1]) <= counts[:, None]],
            status=status,
            wall_s=finished_s - started_s,
            started_s=started_s,
            finished_s=finished_s,
            num_ids=num_ids,
            drafts=StepDrafts(plan.request_id, verified, taken)
            if plan.phase == PHASE_VERIFY
            else None,
        )

    def _round(self, inputs: StepInputs, limits: Tensor) -> Round:
        """Which rows of logits belong to which request, and the drafts they stand behind."""
        sampled = inputs.sampled
        slots = inputs.slots[sampled]
        last = (inputs.start + inputs.lengths - 1)[sampled]
        anchor = torch.where(inputs.from_relay[sampled], self.relay.committed_len[slots], last)
        if not inputs.is_verify:
            return Round(slots, anchor, torch.zeros_like(anchor), RunRows.single(anchor + 1))
        # All requests of a VERIFY step are sampled, every row of theirs.
        lengths = inputs.lengths
        offset = lengths.cumsum(0) - lengths
        place = torch.arange(self.settings.gamma + 1, device=anchor.device)
        index = torch.where(place < lengths.unsqueeze(1), offset.unsqueeze(1) + place, -1)
        requests = torch.arange(lengths.shape[0], device=anchor.device)
        request = requests.repeat_interleave(lengths, output_size=inputs.num_rows)
        row = torch.arange(inputs.num_rows, device=anchor.device)
        positions = row + (anchor + 1 - offset)[request]
        where = ring_rows(slots.unsqueeze(1), anchor.unsqueeze(1) + place[1:])
        is_draft = place[1:] < lengths.unsqueeze(1)
        drafts = torch.where(is_draft, self._runner.pools.token_ring[where], 0)
        return Round(slots, anchor, limits, RunRows(request, positions, index, drafts))

    def _propose(self, step: SpeculativeStep, slots: Tensor, anchor: Tensor, ids: Tensor) -> Tensor:
        """Draft the next block of each request that wants one; returns the confidences [D, gamma]."""
        which, gamma = step.drafting, self.settings.gamma
        if which.shape[0] == 0:
            return self.relay.survival[:0]
        slots, anchor = slots[which], anchor[which]
        pools = self._runner.pools
        history = history_rows(
            slots,
            anchor - 1,
            step.floors[which],
            window=self._window,
            ring_rows=pools.layout.window_ring_rows,
        )
        proposal = self._draft.propose(
            ids[which],
            anchor,
            history,
            gamma=gamma,
            pools=pools,
            choose=self.acceptance.choose(step.table, which, anchor),
        )
        place = torch.arange(1, gamma + 1, device=anchor.device)
        where = ring_rows(slots.unsqueeze(1), anchor.unsqueeze(1) + place)
        pools.token_ring[where] = proposal.ids
        confidences = (proposal.confidence_raw / self._temperatures).sigmoid()
        self.relay.survival[slots] = confidences.cumprod(1)
        if self.relay.draft_logits is not None:
            self.relay.draft_logits[slots] = proposal.logits
        return confidences
