"""Carries the numbers of a step to the device: one copy, from a ring of pinned buffers (serving.md a.10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from dsserve.worker.tensor_tree import map_tensors, tensors_of

if TYPE_CHECKING:
    from dsserve.worker.cuda_device import Device, Event

T = TypeVar("T")

#: Tensors begin at multiples of so many bytes.
ALIGNMENT = 16
#: Bytes of a buffer before a step needs more.
FIRST_CAPACITY = 1 << 20


@dataclass(slots=True)
class _Buffer:
    """Host memory of one step, and the event after which the device no longer reads it."""

    memory: Tensor
    read_done: Event
    is_used: bool = False


class StagingRing:
    """A ring of host buffers. A buffer is written again only when the copy out of it is done."""

    def __init__(self, device: Device, num_buffers: int, capacity: int = FIRST_CAPACITY) -> None:
        """Buffers of `capacity` bytes, which grow when a step needs more."""
        self._device = device
        self._buffers = [
            _Buffer(device.pinned(capacity), device.event()) for _ in range(num_buffers)
        ]
        self._next = 0

    def upload(self, value: T, target: Tensor | None = None) -> T:
        """Copy all tensors of a nested value to the device; called where the step is launched.

        Args:
            value: Host tensors inside dataclasses, dicts and lists.
            target: Device memory [bytes] uint8 to copy to, with room for `packed_bytes(value)`; else new memory.

        Returns:
            The same with tensors on the device.
        """
        tensors = tensors_of(value)
        places, size = _places(tensors)
        buffer = self._take(size)
        for tensor, place in zip(tensors, places, strict=True):
            _view(buffer.memory, place, tensor).copy_(tensor)
        if target is None:
            target = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        target[:size].copy_(buffer.memory[:size], non_blocking=True)
        buffer.read_done.record()
        buffer.is_used = True
        return _placed(value, target)

    def _take(self, size: int) -> _Buffer:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.is_used and not buffer.read_done.query():
            buffer.read_done.synchronize()
        if buffer.memory.numel() < size:
            buffer.memory = self._device.pinned(1 << (size - 1).bit_length())
        return buffer


def download(value: T, memory: Tensor) -> T:
    """Copy all tensors of a nested value on the device to pinned memory, behind what is on the stream.

    Returns:
        The same with tensors in `memory` [bytes] uint8; they mean something once the copies are done.
    """
    host = _placed(value, memory)
    for target, source in zip(tensors_of(host), tensors_of(value), strict=True):
        target.copy_(source, non_blocking=True)
    return host


def packed_bytes(value: object) -> int:
    """Bytes that the tensors of a value take in a buffer."""
    return _places(tensors_of(value))[1]


def _places(tensors: list[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins, and how many bytes they take."""
    places, size = [], 0
    for tensor in tensors:
        places.append(size)
        size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return places, size


def _placed(value: T, memory: Tensor) -> T:
    """The value with its tensors as views of the memory that they were packed into."""
    places = iter(_places(tensors_of(value))[0])
    return map_tensors(value, lambda tensor: _view(memory, next(places), tensor))


def _view(memory: Tensor, place: int, like: Tensor) -> Tensor:
    num_bytes = like.numel() * like.element_size()
    return memory[place : place + num_bytes].view(like.dtype).view(like.shape)
