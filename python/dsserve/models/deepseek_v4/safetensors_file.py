"""One safetensors file: header checked as a whole, tensors copied out of a memory map in bounded chunks.

Types are names here, bytes are bytes: a library that lacks F8_E8M0 does not matter (weights.md section 1).
"""

from __future__ import annotations

import json
import mmap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import numpy as np

from dsserve.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

#: Longest header that is read; the format's own limit.
MAX_HEADER_BYTES = 100_000_000
#: Bytes copied at a time: 65,536 Engram rows of 256.
CHUNK_BYTES = 1 << 24
_LENGTH_BYTES = 8
_AGAIN = "copy or download the file again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: type name and shape as the header gives them, [start, stop) from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


class SafetensorsFile:
    """A mapped file. Use it as a context manager, or call `close`."""

    def __init__(self, path: Path) -> None:
        """Map the file and check its header.

        Raises:
            CheckpointError: If the file is missing, truncated or no safetensors file; nothing of a
                tensor is read.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < _LENGTH_BYTES:
                    raise CheckpointError(f"{path}: truncated: only {size} bytes; {_AGAIN}")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: the file is missing; {_AGAIN}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self.entries: dict[str, TensorEntry] = self._read_entries(size)
        except CheckpointError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def copy_into(
        self,
        name: str,
        destination: NDArray[np.uint8],
        *,
        start: int = 0,
        on_chunk: Callable[[NDArray[np.uint8]], None] | None = None,
    ) -> None:
        """Copy `len(destination)` bytes of a tensor, at most `CHUNK_BYTES` at a time.

        Args:
            name: Tensor name.
            destination: [bytes] uint8, contiguous; filled completely.
            start: First byte within the tensor.
            on_chunk: Called with each part of `destination` once it is filled.

        Raises:
            CheckpointError: If the tensor is shorter than asked for.
        """
        entry = self.entries[name]
        first, stop = entry.start + start, entry.start + start + len(destination)
        if stop > entry.stop:
            raise CheckpointError(
                f"{self.path}: tensor {name}: bytes {start}..{start + len(destination)} lie past its "
                f"{entry.num_bytes} bytes"
            )
        for offset in range(0, len(destination), CHUNK_BYTES):
            part = destination[offset : offset + CHUNK_BYTES]
            source = np.frombuffer(self._map, np.uint8, count=len(part), offset=first + offset)
            part[:] = source
            del source  # an exported view would keep the map from closing
            if on_chunk is not None:
                on_chunk(part)

    def _read_entries(self, size: int) -> dict[str, TensorEntry]:
        header_len = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        if header_len > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: not a safetensors file: its header would have {header_len} bytes; {_AGAIN}"
            )
        data_start = _LENGTH_BYTES + header_len
        if data_start > size:
            raise CheckpointError(
                f"{self.path}: truncated: the header ends at byte {data_start}, the file at {size}; {_AGAIN}"
            )
        header = self._parse(self._map[_LENGTH_BYTES:data_start])
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, raw, data_start) for name, raw in header.items()}
        self._check_layout(entries, data_start, size)
        return entries

    def _parse(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path}: the header is no JSON ({error}); {_AGAIN}"
            ) from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: the header is no JSON object; {_AGAIN}")
        return header

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise CheckpointError(
                f"{self.path}: the header names {twice!r} twice; convert the checkpoint again"
            )
        return result

    def _entry(self, name: str, raw: Any, data_start: int) -> TensorEntry:
        if isinstance(raw, dict):
            dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
            if (
                isinstance(dtype, str)
                and _is_counts(shape)
                and _is_counts(offsets)
                and len(offsets) == 2
                and offsets[0] <= offsets[1]
            ):
                return TensorEntry(
                    dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1]
                )
        raise CheckpointError(
            f"{self.path}: tensor {name}: bad header entry {raw!r:.200}: expected dtype, shape and "
            f"data_offsets [begin, end]; {_AGAIN}"
        )

    def _check_layout(self, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
        """Check that the tensors fill the file without gap or overlap, as the format demands."""
        position = data_start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.stop > size:
                raise CheckpointError(
                    f"{self.path}: truncated: tensor {name} ends at byte {entry.stop}, the file at {size}; {_AGAIN}"
                )
            if entry.start != position:
                what = "overlaps the one before" if entry.start < position else "leaves a gap"
                raise CheckpointError(
                    f"{self.path}: tensor {name} {what}: it begins at byte {entry.start}, "
                    f"expected {position}; convert the checkpoint again"
                )
            position = entry.stop
        if position != size:
            raise CheckpointError(
                f"{self.path}: {size - position} bytes after the last tensor; {_AGAIN}"
            )


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
