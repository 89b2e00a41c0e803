"""What the CUDA worker needs of a device: memory it can copy from, events, one stream, a guard against waiting."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

T = TypeVar("T")


class Event(Protocol):
    """A point on the device's stream."""

    def record(self) -> None:
        """Put it behind everything that was put on the stream before."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to `end_event`, both passed and of the same kind."""
        ...


class Device(Protocol):
    """A device with one stream of steps. Tests put a stand-in on the CPU in its place."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory [num_bytes] uint8 that the device copies from and to without stopping the host."""
        ...

    def event(self) -> Event:
        """A new event with a time."""
        ...

    def launching(self, *, is_setup: bool = False) -> AbstractContextManager[None]:
        """Inside, work goes to the stream, and where the guard is on, a call that waits is an error.

        Args:
            is_setup: Before the first step, when waiting does no harm.
        """
        ...

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record `work` once; returns what repeats it on the same memory, and its result, whose tensors it fills."""
        ...

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        ...


class CudaDevice:
    """One CUDA device and the stream of its steps."""

    def __init__(self, *, is_guarded: bool) -> None:
        """Take the current device.

        Args:
            is_guarded: A call that waits for the device while a step is launched raises (`DSSERVE_SYNC_GUARD`).

        Raises:
            ConfigError: Torch sees no CUDA device.
        """
        if not torch.cuda.is_available():
            built = torch.version.cuda or "none"
            raise ConfigError(
                f"--device cuda: torch {torch.__version__} (CUDA {built}) sees no device; see dsserve doctor, or "
                "use --device cpu",
                param="--device",
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._is_guarded = is_guarded
        self._stream = torch.cuda.Stream(self._device)
        # The operators promise float32 and float64 products (kernels.md section 1).
        torch.set_float32_matmul_precision("highest")

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        return self._device

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        """A timed CUDA event."""
        return torch.cuda.Event(enable_timing=True)

    @contextmanager
    def launching(self, *, is_setup: bool = False) -> Iterator[None]:
        """See `Device.launching`."""
        is_on = self._is_guarded and not is_setup
        with torch.cuda.stream(self._stream), no_waiting(is_on=is_on):
            yield

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Capture a CUDA graph; `work` must have run before, so that nothing is set up inside."""
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, stream=self._stream):
            result = work()
        return graph.replay, result

    def synchronize(self) -> None:
        """Wait for all streams: weights and pools are filled on another one."""
        torch.cuda.synchronize(self._device)


@contextmanager
def no_waiting(*, is_on: bool) -> Iterator[None]:
    """Inside, torch raises where it would wait for a CUDA device; the mode before comes back afterwards."""
    if not is_on:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector from freeing graphs of an earlier worker meanwhile, which CUDA forbids during a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
