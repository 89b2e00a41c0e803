"""What does a step plan say, and is it well formed? For the fake model, without torch."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsserve.errors import EngineFault
from dsserve.worker.base import PHASE_DECODE, PHASE_PREFILL, PHASE_VERIFY, PlanBuffers

Ints = NDArray[np.int64]


class SlotCheckError(EngineFault):
    """A step would have read or written a wrong slot: a bug of the scheduler, located."""

    default_code = "slot_check_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePlan:
    """A private copy of one plan; B requests, T rows.

    Attributes:
        lens: [B] rows per request.
        end: [B] position after each request's last row.
        row_request: [T] which request a row belongs to.
        is_decode: [B] whether the request continues its output (its ids come from the token ring).
    """

    step_id: int
    phase: int
    request_id: NDArray[np.uint64]
    slot: Ints
    start: Ints
    lens: Ints
    end: Ints
    row_request: Ints
    cached_len: Ints
    replay_len: Ints
    tail_len: Ints
    draft_len: Ints
    window_floor: Ints
    write_floor: Ints
    tail_floor: Ints
    samples: NDArray[np.bool_]
    history_ids: Ints
    is_decode: NDArray[np.bool_]
    token_ids: Ints
    positions: Ints
    page_deltas: Ints
    released_slots: Ints

    def describe(self, request: int) -> str:
        """Say which request of which step."""
        names = {PHASE_PREFILL: "PREFILL", PHASE_DECODE: "DECODE", PHASE_VERIFY: "VERIFY"}
        phase = names.get(self.phase, str(self.phase))
        return (
            f"step {self.step_id} ({phase}), request {self.request_id[request]} in slot "
            f"{self.slot[request]}, rows [{self.start[request]}, {self.end[request]})"
        )

    def moved_to(self, start: Ints) -> "FakePlan":
        """The same rows from other positions on."""
        return replace(
            self,
            start=start,
            end=start + self.lens,
            positions=self.positions + (start - self.start)[self.row_request],
        )

    def rows_of(self, requests: Ints, start: Ints, lens: Ints) -> "FakePlan":
        """A plan of some of the requests, at `start` with `lens` rows each, that changes no page table."""
        return replace(
            self,
            request_id=self.request_id[requests],
            slot=self.slot[requests],
            start=start,
            lens=lens,
            end=start + lens,
            row_request=np.repeat(np.arange(len(requests)), lens),
            cached_len=self.cached_len[requests],
            replay_len=self.replay_len[requests],
            tail_len=lens,
            draft_len=np.zeros_like(lens),
            window_floor=self.window_floor[requests],
            write_floor=self.write_floor[requests],
            tail_floor=self.tail_floor[requests],
            samples=self.samples[requests],
            history_ids=self.history_ids[requests],
            is_decode=self.is_decode[requests],
            token_ids=np.full(int(lens.sum()), -1, np.int64),
            positions=np.concatenate(
                [np.arange(first, first + n) for first, n in zip(start, lens, strict=True)]
                or [np.zeros(0, np.int64)]
            ),
            page_deltas=self.page_deltas[:0],
            released_slots=self.released_slots[:0],
        )


def read_plan(buffers: PlanBuffers, *, launched_step_id: int) -> FakePlan:
    """Copy a plan out of its buffer set and check its form.

    Raises:
        SlotCheckError: The set was rewritten since the launch, or its fields contradict each other.
    """
    header = buffers["header"].tolist()
    step_id, phase, requests, rows, deltas, tail_rows, released, sampled, max_len = header[:9]
    if step_id != launched_step_id:
        raise SlotCheckError(
            f"buffer set of step {launched_step_id} was rewritten for step {step_id} in flight"
        )

    def part(field: str, length: int) -> NDArray[Any]:
        return buffers[field][:length].astype(np.int64)

    cu_seqlens = part("cu_seqlens", requests + 1)
    start, lens = part("start_position", requests), np.diff(cu_seqlens)
    history_ids = part("history_ids", requests)
    plan = FakePlan(
        step_id=step_id,
        phase=phase,
        request_id=buffers["request_id"][:requests].copy(),
        slot=part("request_slot", requests),
        start=start,
        lens=lens,
        end=start + lens,
        row_request=np.repeat(np.arange(requests), np.maximum(lens, 0)),
        cached_len=part("cached_len", requests),
        replay_len=part("replay_len", requests),
        tail_len=part("tail_len", requests),
        draft_len=part("draft_len", requests),
        window_floor=part("window_floor", requests),
        write_floor=part("write_floor", requests),
        tail_floor=part("tail_floor", requests),
        samples=buffers["samples"][:requests].astype(np.bool_),
        history_ids=history_ids,
        is_decode=(history_ids == -2).all(axis=1),
        token_ids=part("token_ids", rows),
        positions=part("positions", rows),
        page_deltas=part("page_deltas", deltas),
        released_slots=part("released_slots", released),
    )
    _check_form(plan, cu_seqlens, tail_rows=tail_rows, sampled=sampled, max_len=max_len)
    return plan


def _check_form(
    plan: FakePlan, cu_seqlens: Ints, *, tail_rows: int, sampled: int, max_len: int
) -> None:
    def require(condition: object, what: str) -> None:
        if not condition:
            raise SlotCheckError(f"step {plan.step_id}: {what}")

    phases = (PHASE_PREFILL, PHASE_DECODE, PHASE_VERIFY)
    require(plan.phase in phases, f"phase {plan.phase} has no meaning here")
    require(len(plan.slot) > 0, "a plan without requests")
    require(
        cu_seqlens[0] == 0 and cu_seqlens[-1] == len(plan.token_ids) and (plan.lens > 0).all(),
        f"cu_seqlens {cu_seqlens.tolist()} do not divide {len(plan.token_ids)} rows",
    )
    first_row = np.repeat(cu_seqlens[:-1], plan.lens)
    expected = plan.start[plan.row_request] + np.arange(len(plan.token_ids)) - first_row
    require((plan.positions == expected).all(), "positions do not follow start_position")
    require(len(np.unique(plan.slot)) == len(plan.slot), "a slot twice in a plan")
    require(len(np.unique(plan.request_id)) == len(plan.slot), "a request twice in a plan")
    require(plan.tail_len.sum() == tail_rows, f"header says {tail_rows} tail rows")
    require(plan.samples.sum() == sampled, f"header says {sampled} sampling rows")
    require(plan.end.max() == max_len, f"header says {max_len} positions at most")
    require(
        ((plan.tail_len >= 0) & (plan.tail_len <= plan.lens)).all(),
        f"tail_len {plan.tail_len.tolist()} of {plan.lens.tolist()} rows",
    )
    require((plan.tail_len[plan.samples] > 0).all(), "a sampling row outside the tail")
    require(
        (plan.phase != PHASE_DECODE) or (plan.is_decode.all() and (plan.lens == 1).all()),
        "a DECODE step with more than one row per request",
    )
    require(
        (plan.phase != PHASE_VERIFY) or (plan.is_decode.all() and plan.samples.all()),
        "a VERIFY step with rows of a prompt, or without samples",
    )
    require(
        (plan.phase == PHASE_VERIFY) or (plan.draft_len == 0).all(),
        "drafts outside of a VERIFY step",
    )
    require(
        (plan.lens[plan.is_decode] == plan.draft_len[plan.is_decode] + 1).all(),
        "a decoding request with other rows than its anchor and its drafts",
    )
