"""What does the step loop ask of a worker?

The loop runs on one thread and never waits inside `launch`: a step is put on the worker's stream
(`worker/stream.py`, or a CUDA stream) and its `StepHandle` is waited for one step later.

Construction: `build_worker(config: EngineConfig, capacity: dict[str, int], progress: Progress)`
in `worker/worker.py` (the model) and `worker/fake.py` (the fake model). `capacity` is the
scheduler's `plan_capacity()` (requests, rows, deltas, slots, columns) plus `pages` (usable pages,
ids 1..=pages; page 0 is the dummy page) and `page_size`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsserve.protocol.engine import SamplingParams, Script

PlanBuffers = dict[str, NDArray[Any]]
"""One set of step plan arrays by field name, as the scheduler fills them."""

Progress = Callable[[str, int, int], None]
"""Told (stage, done, total) while loading; total 0 means unknown."""

NUM_BUFFER_SETS = 3
"""Sets in the ring: one more than the most steps in flight, so none is rewritten while read."""

PHASE_IDLE, PHASE_PREFILL, PHASE_DECODE, PHASE_VERIFY, PHASE_PREBUILT = range(5)
"""Values of the plan header's phase."""

STATUS_OK, STATUS_NAN = 0, 1
"""Values of `StepResult.status`."""

PLAN_FIELDS: Mapping[str, tuple[type[np.generic], str, int]] = {
    "header": (np.int64, "header", 1),
    "request_id": (np.uint64, "requests", 1),
    "request_slot": (np.int32, "requests", 1),
    "cu_seqlens": (np.int32, "requests + 1", 1),
    "start_position": (np.int32, "requests", 1),
    "cached_len": (np.int32, "requests", 1),
    "replay_len": (np.int32, "requests", 1),
    "tail_len": (np.int32, "requests", 1),
    "draft_len": (np.int32, "requests", 1),
    "window_floor": (np.int32, "requests", 1),
    "write_floor": (np.int32, "requests", 1),
    "tail_floor": (np.int32, "requests", 1),
    "samples": (np.uint8, "requests", 1),
    "history_ids": (np.int32, "requests", 3),
    "token_ids": (np.int32, "rows", 1),
    "positions": (np.int32, "rows", 1),
    "page_deltas": (np.int32, "deltas", 3),
    "released_slots": (np.int32, "slots", 1),
}
"""Step plan arrays: dtype, which capacity gives the length, numbers per entry."""

HEADER_LEN = 16


def plan_array_shape(field: str, capacity: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one array of a buffer set."""
    _, length, width = PLAN_FIELDS[field]
    lengths = {**capacity, "header": HEADER_LEN, "requests + 1": capacity["requests"] + 1}
    return (lengths[length],) if width == 1 else (lengths[length], width)


def allocate_plan_buffers(capacity: Mapping[str, int]) -> PlanBuffers:
    """Allocate one buffer set in ordinary host memory, zeroed."""
    return {
        field: np.zeros(plan_array_shape(field, capacity), dtype=dtype)
        for field, (dtype, _, _) in PLAN_FIELDS.items()
    }


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """What stays the same while a request runs, told once before its first step.

    Attributes:
        prompt_token_ids: [prompt length] uint32, for penalties over the prompt.
        stop_token_ids: Ids that end it besides the model's own; with `min_new_tokens` the sampler
            masks both kinds until so many ids were drawn.
        ignore_eos: The model's end-of-sequence ids do not end it (nor are they masked).
        script: For the fake model only.
        draft_len: Draft tokens it wants at most, 0 = none; None = what the server gives.
        simulated_len: For benchmarks: accepted drafts and the token behind them, on average, whatever
            the target says; None = the truth.
    """

    request_id: int
    sampling: SamplingParams
    prompt_token_ids: NDArray[np.uint32]
    stop_token_ids: tuple[int, ...]
    min_new_tokens: int
    ignore_eos: bool
    script: Script | None = None
    draft_len: int | None = None
    simulated_len: float | None = None


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """What became of the drafts of a step, in the order of its plan's requests.

    Attributes:
        request_ids: [B] uint64.
        verified: [B] uint32, drafts that the target looked at.
        accepted: [B] uint32, those it took.
    """

    request_ids: NDArray[np.uint64]
    verified: NDArray[np.uint32]
    accepted: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, in the order of its plan's requests.

    Attributes:
        token_ids: [B] int32, -1 where nothing was sampled; with `num_ids` the runs of all requests
            one after another.
        status: [B] uint8, `STATUS_OK` or `STATUS_NAN`.
        wall_s: `finished_s - started_s`: the step on the device, without waiting for its turn.
        started_s: `time.monotonic()` when the device began.
        finished_s: `time.monotonic()` when the ids were on the host.
        num_ids: [B] uint32, the length of each request's run (accepted drafts and the id after
            them, 0 where nothing was sampled); None where each request has one id.
        drafts: What became of drafts; None without any.
    """

    step_id: int
    token_ids: NDArray[np.int32]
    status: NDArray[np.uint8]
    wall_s: float
    started_s: float
    finished_s: float
    num_ids: NDArray[np.uint32] | None = None
    drafts: StepDrafts | None = None


class StepHandle(Protocol):
    """A launched step."""

    def done(self) -> bool:
        """Say without waiting whether `wait` would return at once."""
        ...

    def wait_done(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the step to end, well or badly; say whether it did."""
        ...

    def wait(self) -> StepResult:
        """Wait for the step. Any exception of the step is raised here."""
        ...


class Worker(Protocol):
    """Runs the steps of one engine process. All calls come from the step loop's thread."""

    def buffer_sets(self) -> list[PlanBuffers]:
        """Give the `NUM_BUFFER_SETS` sets of plan arrays, the same ones on each call."""
        ...

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Learn the constants of requests; the next launched plan is the first to hold them.

        Called once per request, also if it is retracted and resumed later.
        """
        ...

    def launch(self, set_index: int) -> StepHandle:
        """Put the plan in buffer set `set_index` on the stream and return before it ran.

        Placeholders (-1) in `token_ids` stand for ids that an earlier step has yet to sample.
        """
        ...

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget ended requests. Steps launched before this call may still contain them."""
        ...

    def totals(self) -> dict[str, Any]:
        """Running totals that the metrics show, by the names of `observe.metrics`."""
        ...

    def close(self) -> None:
        """Run what was launched, then give back threads and memory. A second call does nothing."""
        ...
