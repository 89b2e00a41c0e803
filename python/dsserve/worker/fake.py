"""What stands in for the model under `--load-format fake`?

`FakeWorker` behaves like a device: steps run in order on a stream of their own, ids not known at
launch are read from a token ring there, and a plan is read from its buffer set when the step runs.
It computes nothing but checks everything a real step would read or write (`fake_kv.py`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dsserve.config.model import ModelConfig, load_model_config
from dsserve.config.server import ServerConfig
from dsserve.errors import EngineFault
from dsserve.protocol.engine import EngineConfig
from dsserve.worker.base import (
    NUM_BUFFER_SETS,
    PHASE_VERIFY,
    STATUS_NAN,
    STATUS_OK,
    AdmittedRequest,
    PlanBuffers,
    Progress,
    StepDrafts,
    StepHandle,
    StepResult,
    allocate_plan_buffers,
)
from dsserve.worker.fake_kv import SlotMemory
from dsserve.worker.fake_model import CONTEXT_LEN, FakeSettings, next_tokens, read_fake_settings
from dsserve.worker.fake_plan import FakePlan, read_plan
from dsserve.worker.stream import Stream

if TYPE_CHECKING:
    from dsserve.protocol.engine import Script


class DeviceFault(EngineFault):
    """What a CUDA error is to the real worker."""

    default_code = "device_fault"


class FakeWorker:
    """A worker without a model. See `worker.base.Worker`."""

    def __init__(
        self,
        model: ModelConfig,
        capacity: dict[str, int],
        *,
        context_length: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Allocate the slots.

        Args:
            model: Gives vocabulary size, window and the settings of the fake model.
            capacity: See `worker.base`.
            context_length: Longest prompt plus output.
            clock: Seconds, for the times in step results.
            sleep: Called on the stream for what is left of a step's configured time.
        """
        self._settings: FakeSettings = read_fake_settings(model.fake, vocab_size=model.vocab_size)
        self._clock = clock
        self._sleep = sleep
        self._sets = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
        self._memory = SlotMemory(
            num_pages=capacity["pages"],
            page_size=capacity["page_size"],
            num_slots=capacity["slots"],
            columns=capacity["columns"],
            window=model.sliding_window,
            context_length=context_length,
        )
        self._scripts: dict[int, tuple[Script, int]] = {}  # with the prompt's length
        self._stream = Stream("fake worker stream")

    def buffer_sets(self) -> list[PlanBuffers]:
        """The plan arrays."""
        return self._sets

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Learn prompts and scripts, in order with the steps."""
        self._stream.submit(lambda: self._admit(requests))

    def launch(self, set_index: int) -> StepHandle:
        """Queue a step."""
        step_id = int(self._sets[set_index]["header"][0])
        return self._stream.submit(lambda: self._run(set_index, step_id))

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget requests, after the steps launched so far."""
        self._stream.submit(lambda: self._release(request_ids))

    def totals(self) -> dict[str, Any]:
        """None: there is no model."""
        return {}

    def close(self) -> None:
        """End the stream."""
        self._stream.close()

    def _admit(self, requests: Sequence[AdmittedRequest]) -> None:
        for request in requests:
            self._memory.admit(request.request_id, request.prompt_token_ids)
            if request.script is not None:
                length = len(request.prompt_token_ids)
                self._scripts[request.request_id] = (request.script, length)

    def _release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._memory.forget(request_id)
            self._scripts.pop(request_id, None)

    def _run(self, set_index: int, step_id: int) -> StepResult:
        started_s = self._clock()
        plan = read_plan(self._sets[set_index], launched_step_id=step_id)
        if self._settings.draft_accept is not None:
            plan = self._memory.located(plan)
        if plan.phase == PHASE_VERIFY:
            return self._run_verify(plan, started_s)
        token_ids, status, delay_s = self._run_once(plan)
        return self._result(plan, started_s, delay_s, token_ids, status)

    def _run_verify(self, plan: FakePlan, started_s: float) -> StepResult:
        """A run of tokens is as many decode steps of one row, with the rejected drafts written behind it."""
        pattern = self._settings.draft_accept or [0]
        wanted = np.array([pattern[start % len(pattern)] for start in plan.start.tolist()])
        accepted = np.minimum(wanted, plan.draft_len)
        runs: list[list[int]] = [[] for _ in plan.slot]
        status = np.zeros(len(runs), np.uint8)
        delay_s = 0.0
        goes_on = np.arange(len(runs))
        for place in range(int(accepted.max()) + 1):
            row = plan.rows_of(goes_on, plan.start[goes_on] + place, np.ones_like(goes_on))
            if place == 0:
                row = replace(row, page_deltas=plan.page_deltas, released_slots=plan.released_slots)
            ids, broken, slept_s = self._run_once(row)
            status[goes_on] = broken
            delay_s = max(delay_s, slept_s)
            for request, token_id in zip(goes_on.tolist(), ids.tolist(), strict=True):
                runs[request].append(token_id)
            goes_on = goes_on[(accepted[goes_on] > place) & (broken == STATUS_OK)]
        num_ids = np.array([len(run) for run in runs])
        rejected = plan.draft_len + 1 - num_ids
        rest = plan.rows_of(np.arange(len(runs)), plan.start + num_ids, rejected)
        # No id of the fake model is negative: whoever reads what a rejected draft left notices.
        self._memory.run_rejected(rest, np.full(len(rest.positions), -2, np.int64))
        token_ids = np.array([token_id for run in runs for token_id in run], np.int32)
        result = self._result(plan, started_s, delay_s, token_ids, status)
        drafts = StepDrafts(
            plan.request_id, plan.draft_len.astype(np.uint32), (num_ids - 1).astype(np.uint32)
        )
        return replace(result, num_ids=num_ids.astype(np.uint32), drafts=drafts)

    def _run_once(self, plan: FakePlan) -> tuple[NDArray[np.int32], NDArray[np.uint8], float]:
        """The next ids, which rows are broken, and the longest delay that a script asks for."""
        self._memory.run(plan)
        context = self._memory.context(plan, CONTEXT_LEN)
        token_ids = next_tokens(context, plan.end, self._settings)
        token_ids[~plan.samples] = -1
        status = np.zeros(len(token_ids), np.uint8)
        delay_s = self._follow_scripts(plan, token_ids, status)
        self._memory.append(plan, token_ids.astype(np.int64))
        return token_ids, status, delay_s

    def _result(
        self,
        plan: FakePlan,
        started_s: float,
        delay_s: float,
        token_ids: NDArray[np.int32],
        status: NDArray[np.uint8],
    ) -> StepResult:
        """Sleep for what is left of the step's time."""
        left_s = started_s + self._settings.step_s(plan.positions) + delay_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        finished_s = self._clock()
        return StepResult(
            plan.step_id, token_ids, status, finished_s - started_s, started_s, finished_s
        )

    def _follow_scripts(
        self, plan: FakePlan, token_ids: NDArray[np.int32], status: NDArray[np.uint8]
    ) -> float:
        """Overwrite ids and states that scripts set; returns the longest delay in seconds."""
        delay_us = 0
        if not self._scripts:
            return 0.0
        for request in np.flatnonzero(plan.samples).tolist():
            entry = self._scripts.get(int(plan.request_id[request]))
            if entry is None:
                continue
            script, prompt_len = entry
            index = int(plan.end[request]) - prompt_len
            if index < len(script.ids):
                token_ids[request] = script.ids[index]
            if index < len(script.delays_us):
                delay_us = max(delay_us, script.delays_us[index])
            if index == script.fault_at:
                raise DeviceFault(f"{plan.describe(request)}: a fault asked for by its script")
            if index == script.nan_at:
                status[request] = STATUS_NAN
        return delay_us * 1e-6


def build_worker(
    config: EngineConfig, capacity: dict[str, int], progress: Progress | None = None
) -> FakeWorker:
    """Build the fake model for an engine process; see `worker.base`.

    Raises:
        ConfigError: The settings of the fake model are wrong.
    """
    server = ServerConfig.from_dict(config.server)
    model = load_model_config(config.model_path, server.json_model_override_args)
    worker = FakeWorker(
        model,
        capacity,
        context_length=server.context_length or model.max_position_embeddings,
    )
    if progress is not None:
        progress("fake model", 1, 1)
    return worker
