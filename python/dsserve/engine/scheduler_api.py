"""What does the step loop need of a scheduler? `dsserve._native.Scheduler`, or a stub in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class StepSummary(Protocol):
    """What a plan holds, see `_native.StepSummary`."""

    @property
    def step_id(self) -> int: ...  # noqa: D102
    @property
    def phase(self) -> int: ...  # noqa: D102
    @property
    def num_requests(self) -> int: ...  # noqa: D102
    @property
    def num_rows(self) -> int: ...  # noqa: D102
    @property
    def num_replay_rows(self) -> int: ...  # noqa: D102
    @property
    def num_tail_rows(self) -> int: ...  # noqa: D102
    @property
    def num_prefill_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_cached_tokens(self) -> int: ...  # noqa: D102
    @property
    def admitted(self) -> list[int]: ...  # noqa: D102


class StepOutputs(Protocol):
    """New tokens and ends of requests, see `_native.StepOutputs`."""

    @property
    def len(self) -> int: ...  # noqa: D102
    @property
    def request_ids(self) -> bytes: ...  # noqa: D102
    @property
    def token_offsets(self) -> bytes: ...  # noqa: D102
    @property
    def token_ids(self) -> bytes: ...  # noqa: D102
    @property
    def finish_codes(self) -> bytes: ...  # noqa: D102
    @property
    def prompt_lens(self) -> bytes: ...  # noqa: D102
    @property
    def cached_lens(self) -> bytes: ...  # noqa: D102
    @property
    def output_lens(self) -> bytes: ...  # noqa: D102


class SchedulerApi(Protocol):
    """The calls of the step loop, see `_native.Scheduler`."""

    def submit(self, specs: list[dict[str, Any]]) -> list[tuple[int, str, str]]: ...  # noqa: D102
    def extend_prompt(  # noqa: D102
        self, request_id: int, token_ids: NDArray[np.uint32]
    ) -> tuple[int, str, str] | None: ...
    def next_plan(self, set_index: int, now_us: int) -> StepSummary | None: ...  # noqa: D102
    def apply(  # noqa: D102
        self,
        step_id: int,
        token_ids: NDArray[np.int32],
        status: NDArray[np.uint8],
        now_us: int,
        num_ids: NDArray[np.uint32] | None = None,
    ) -> StepOutputs: ...
    def take_outputs(self) -> StepOutputs: ...  # noqa: D102
    def abort(self, request_ids: list[int]) -> None: ...  # noqa: D102
    def finish(self, request_id: int, kept_output_tokens: int) -> None: ...  # noqa: D102
    def flush(self) -> tuple[bool, list[int]]: ...  # noqa: D102
    def stats(self) -> dict[str, float]: ...  # noqa: D102
    def pool_table(self) -> list[dict[str, Any]]: ...  # noqa: D102
    def check_invariants(self) -> None: ...  # noqa: D102
    def has_work(self) -> bool: ...  # noqa: D102
