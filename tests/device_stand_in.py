"""A stand-in for the CUDA device on the CPU: the same worker code runs on it, with the operators chosen for CUDA.

Its stream runs at once, but its events are passed only when the test says so or somebody waits. Inside `launching` a
call that would wait for a CUDA device is refused, as the guard does there.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsserve.worker.tensor_tree import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

T = TypeVar("T")
#: Operators that on CUDA wait for the device, because a size or a number of the host depends on what is in a tensor.
WAITS = (
    "nonzero",
    "_local_scalar_dense",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "equal",
)
INDEXING = ("index", "index_put_", "_index_put_impl_", "index_put")


class WaitedError(Exception):
    """Something would have waited for the device."""


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITS:
            raise WaitedError(name)
        if name in INDEXING:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise WaitedError(f"{name} by booleans")
        return func(*args, **(kwargs or {}))


class StandInEvent:
    """Passed once recorded, or only when waited for if the device holds its events back."""

    def __init__(self, device: StandInDevice) -> None:
        self.device = device
        self.at_ms = -1.0
        self.is_passed = False

    def record(self) -> None:
        self.at_ms = float(next(self.device.ticks))
        self.is_passed = not self.device.holds_events

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        if self.device.is_launching:
            raise WaitedError("event")
        self.is_passed = True

    def elapsed_time(self, end_event: Any) -> float:
        assert self.is_passed, "an event that was not passed has no time"
        assert end_event.is_passed, "an event that was not passed has no time"
        return float(end_event.at_ms - self.at_ms)


class StandInDevice:
    """See the module."""

    def __init__(self, *, holds_events: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.holds_events = holds_events
        self.is_launching = False
        self.ticks = itertools.count()
        self.pinned_sizes: list[int] = []
        self.num_captures = 0

    def pinned(self, num_bytes: int) -> Tensor:
        self.pinned_sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def event(self) -> StandInEvent:
        return StandInEvent(self)

    @contextmanager
    def launching(self, *, is_setup: bool = False) -> Iterator[None]:
        self.is_launching = True
        try:
            if is_setup:
                yield
            else:
                with NoWaiting():
                    yield
        finally:
            self.is_launching = False

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A graph that runs the work again and fills the same tensors."""
        self.num_captures += 1
        result = work()

        def replay() -> None:
            for kept, new in zip(tensors_of(result), tensors_of(work()), strict=True):
                kept.copy_(new)

        return replay, result

    def synchronize(self) -> None:
        assert not self.is_launching
