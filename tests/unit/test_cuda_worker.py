"""The CUDA worker on a stand-in device: the tokens of the CPU worker, and never a wait while a step is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from device_stand_in import StandInDevice
from dsserve.worker.cuda_graphs import Bucket
from verify_runs import (
    GAMMA,
    KnownDrafts,
    VerifyStep,
    assert_same_steps,
    ending_asks,
    limited_asks,
    trace,
    unlike_asks,
)
from worker_drive import (
    Ask,
    Drive,
    asks,
    cpu_worker,
    device_worker,
    draft_worker,
    load,
    plain_asks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@pytest.fixture(scope="module")
def model() -> Any:
    return load("cuda")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = load("cpu")
    outputs = Drive(lambda capacity: cpu_worker(model, capacity)).run(asks())
    assert [len(ids) for ids in outputs] == [3, 5, 5, 5, 5, 4]
    assert outputs[5][-1] == 1, "the end token comes as soon as it may"
    return outputs


@pytest.mark.parametrize("buckets", [(), (Bucket(3, 512), Bucket(8, 80))], ids=["eager", "graphs"])
def test_the_device_worker_draws_the_tokens_of_the_cpu_worker(
    model: Any, expected: list[list[int]], buckets: tuple[Bucket, ...]
) -> None:
    device = StandInDevice()
    drive = Drive(lambda capacity: device_worker(model, device, capacity, buckets))
    assert drive.run(asks()) == expected
    assert device.num_captures == len(buckets)
    assert (drive.worker.num_replays > 0) == bool(buckets)


@pytest.mark.slow
def test_drafts_on_the_device_change_nothing(expected: list[list[int]]) -> None:
    model = load("cuda", draft=True)
    drive = Drive(lambda capacity: draft_worker(model, StandInDevice(), capacity), "DSPARK")
    assert drive.run(asks()) == expected


@pytest.mark.slow
def test_replayed_verify_steps_change_nothing(model: Any) -> None:
    without = Drive(lambda capacity: device_worker(model, StandInDevice(), capacity))
    drafting, device = load("cuda", draft=True), StandInDevice()
    buckets = [Bucket(2, 512), Bucket(4, 96)]
    drive = Drive(lambda capacity: draft_worker(drafting, device, capacity, buckets), "DSPARK")
    assert drive.run(plain_asks()) == without.run(plain_asks())
    assert device.num_captures == 2 * len(buckets)
    assert drive.worker.num_replays == drive.num_verify_steps > 2


@dataclass
class CutRun:
    """Requests whose blocks are cut, what they give without drafts, and a model with a draft head."""

    asks: list[Ask]
    expected: list[list[int]]
    drafting: Any

    def run(
        self, max_requests: int, buckets: Sequence[Bucket] = (), **settings: Any
    ) -> tuple[list[list[int]], list[VerifyStep]]:
        """Outputs and verify steps; with buckets all of these are replayed."""
        steps: list[VerifyStep] = []
        draft = KnownDrafts(self.asks, self.expected, "cpu")

        def build(capacity: dict[str, int]) -> Any:
            device = StandInDevice()
            worker = draft_worker(self.drafting, device, capacity, buckets, draft, **settings)
            return trace(worker, steps)

        drive = Drive(build, "DSPARK", max_requests)
        outputs = drive.run(self.asks)
        assert drive.num_verify_steps == len(steps)
        assert drive.worker.num_replays == (len(steps) if buckets else 0)
        return outputs, steps

    def check(self, max_requests: int, bucket: Bucket, **settings: Any) -> list[VerifyStep]:
        """Replayed steps leave what eager ones leave; without settings, tokens are those without drafts."""
        eager, eager_steps = self.run(max_requests, **settings)
        ours, steps = self.run(max_requests, [bucket], **settings)
        assert ours == eager
        assert settings or ours == self.expected
        assert_same_steps(steps, eager_steps)
        return steps


@pytest.fixture(scope="module")
def cut_run(model: Any) -> Callable[[list[Ask]], CutRun]:
    drafting = load("cuda", draft=True)

    def build(asks: list[Ask]) -> CutRun:
        without = Drive(lambda capacity: device_worker(model, StandInDevice(), capacity))
        expected = without.run([replace(ask, draft_len=None) for ask in asks])
        return CutRun(asks, expected, drafting)

    return build


@pytest.mark.parametrize(
    ("max_requests", "bucket"),
    [
        (6, Bucket(6, 512)),
        pytest.param(1, Bucket(1, 512), marks=pytest.mark.slow),
        pytest.param(3, Bucket(4, 512), marks=pytest.mark.slow),
    ],
    ids=["full", "alone", "padded"],
)
def test_the_last_steps_of_requests_are_replayed(
    cut_run: Any, max_requests: int, bucket: Bucket
) -> None:
    steps = cut_run(limited_asks()).check(max_requests, bucket)
    assert {*range(1, GAMMA + 1)} <= {int(most) for step in steps for most in step.draft_len}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"sampling": "rejection"}, {"sampling": "greedy-draft", "is_block": True}],
    ids=["shared-noise", "rejection", "block"],
)
def test_steps_of_requests_that_want_other_drafts_are_replayed(
    cut_run: Any, settings: dict[str, Any]
) -> None:
    steps = cut_run(unlike_asks()).check(7, Bucket(7, 512), **settings)
    assert steps[0].draft_len.tolist() == [*range(GAMMA + 1)]


@pytest.mark.slow
def test_steps_with_an_end_inside_the_block_are_replayed(cut_run: Any) -> None:
    endless = cut_run(unlike_asks())
    ended = cut_run(ending_asks(endless.asks, endless.expected))
    lengths = [len(ids) for ids in ended.expected]
    assert len(set(lengths)) > 3
    assert all(length < ask.count for length, ask in zip(lengths, ended.asks, strict=True))
    ended.check(7, Bucket(8, 512))
