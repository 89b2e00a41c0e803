"""A checkpoint directory: its index, its shards, and the strict comparison with the expected tensors."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dsserve.errors import CheckpointError
from dsserve.models.deepseek_v4.safetensors_file import SafetensorsFile, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from dsserve.models.deepseek_v4.tensors import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
#: Problems named in one message; the rest is counted.
_MAX_NAMED = 4


class Checkpoint:
    """All shards of a checkpoint, mapped, with the place of every tensor.

    Opening reads headers only and checks that index and shards agree: every name of the index lies in
    its shard, no shard holds another name, no name lies in two shards.
    """

    def __init__(self, path: Path) -> None:
        """Open the shards.

        Args:
            path: Directory with `model.safetensors.index.json`, or with a single `model.safetensors`.

        Raises:
            CheckpointError: If there is no checkpoint, a shard is missing or damaged, or index and
                shards disagree.
        """
        self.path = path
        self._stack = ExitStack()
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._open()
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
        """Unmap all shards."""
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def entry(self, name: str) -> TensorEntry:
        """Header entry of a tensor."""
        return self._files[name].entries[name]

    def file(self, name: str) -> SafetensorsFile:
        """The shard that holds a tensor."""
        return self._files[name]

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Compare with the expected tensors; skipped ones must be right too.

        Raises:
            CheckpointError: Naming every kind of problem with the first tensors that have it.
        """
        missing = [name for name in expected if name not in self._files]
        unknown = [name for name in self._files if name not in expected]
        wrong = [
            problem
            for name, spec in expected.items()
            if name in self._files and (problem := self._mismatch(name, spec)) is not None
        ]
        problems = []
        if missing:
            problems.append(f"missing from {self._where()}: {_first(missing)}")
        if unknown:
            places = [f"{name} (in {self._files[name].path.name})" for name in unknown]
            problems.append(f"not a tensor of this configuration: {_first(places)}")
        if wrong:
            problems.append(_first(wrong, separator="; "))
        if problems:
            raise CheckpointError(
                f"{self.path}: the tensors do not fit config.json: {'; '.join(problems)}. Use the files and the "
                "config.json of one checkpoint in the released V4.1 format"
            )

    def _open(self) -> None:
        index_file = self.path / INDEX_NAME
        if index_file.is_file():
            weight_map, total_size = _read_index(index_file)
            shards = sorted(set(weight_map.values()))
        elif (self.path / SINGLE_NAME).is_file():
            weight_map, total_size, shards = None, None, [SINGLE_NAME]
        else:
            raise CheckpointError(
                f"{self.path}: neither {INDEX_NAME} nor {SINGLE_NAME}: --model-path must name a directory with "
                "safetensors weights (or start with --load-format dummy)"
            )
        for shard in shards:
            self._add_shard(shard, weight_map)
        if weight_map is not None:
            self._check_index(index_file, weight_map, total_size)

    def _add_shard(self, shard: str, weight_map: Mapping[str, str] | None) -> None:
        file = self._stack.enter_context(SafetensorsFile(self.path / shard))
        for name in file.entries:
            if name in self._files:
                raise CheckpointError(
                    f"{self.path}: tensor {name} lies in {self._files[name].path.name} and in {shard}; "
                    "remove one of the files or convert the checkpoint again"
                )
            if weight_map is not None and name not in weight_map:
                raise CheckpointError(
                    f"{file.path}: tensor {name} is not in {INDEX_NAME}; index and shards must come from "
                    "one checkpoint"
                )
            self._files[name] = file

    def _check_index(
        self, index_file: Path, weight_map: Mapping[str, str], total_size: int | None
    ) -> None:
        for name, shard in weight_map.items():
            file = self._files.get(name)
            if file is None or file.path.name != shard:
                place = "in no shard" if file is None else f"in {file.path.name}"
                raise CheckpointError(
                    f"{index_file}: tensor {name} should be in {shard} but is {place}; index and shards must "
                    "come from one checkpoint"
                )
        num_bytes = sum(self.entry(name).num_bytes for name in self._files)
        if total_size is not None and total_size != num_bytes:
            raise CheckpointError(
                f"{index_file}: metadata.total_size is {total_size}, the shards hold {num_bytes} bytes; index "
                "and shards must come from one checkpoint"
            )

    def _mismatch(self, name: str, spec: TensorSpec) -> str | None:
        entry, place = self.entry(name), self._files[name].path.name
        if entry.dtype not in spec.dtype.file_types:
            return f"tensor {name} in {place} has type {entry.dtype}, expected {spec.dtype.value}"
        if entry.shape not in spec.file_shapes(entry.dtype):
            return (
                f"tensor {name} in {place} has shape {list(entry.shape)}, "
                f"expected {list(spec.file_shapes(entry.dtype)[0])}"
            )
        if entry.num_bytes != spec.num_bytes:
            return f"tensor {name} in {place} has {entry.num_bytes} bytes, its shape needs {spec.num_bytes}"
        return None

    def _where(self) -> str:
        return INDEX_NAME if (self.path / INDEX_NAME).is_file() else SINGLE_NAME


def _read_index(file: Path) -> tuple[dict[str, str], int | None]:
    """Return the weight map and, if given, the total size."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: no weight_map (tensor name -> shard file) in it")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(
                f"{file}: tensor {name}: {shard!r} is no plain file name; shards lie next to the index"
            )
    return weight_map, _total_size(raw)


def _total_size(raw: dict[str, Any]) -> int | None:
    metadata = raw.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return size if isinstance(size, int) else None


def _first(items: list[str], *, separator: str = ", ") -> str:
    rest = len(items) - _MAX_NAMED
    return separator.join(items[:_MAX_NAMED]) + (
        f" and {rest} more ({len(items)} in all)" if rest > 0 else ""
    )
