"""Loads the weights of a DeepSeek-V4.1 checkpoint: strict, in storage form, in bounded chunks.

Rules: weights.md section 4. Nothing is converted here: FP8 codes stay E4M3, UE8M0 scales and packed FP4 are
raw bytes (uint8), so the tensors can be placed, merged or sliced without loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsserve.errors import CheckpointError, ConfigError
from dsserve.models.deepseek_v4.checkpoint import Checkpoint
from dsserve.models.deepseek_v4.random_weights import draw_weights
from dsserve.models.deepseek_v4.tensors import StorageType, TensorSpec, expected_tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dsserve.config.model import ModelConfig

logger = logging.getLogger(__name__)

#: Called with (bytes done, bytes in all, stage).
Progress = Callable[[int, int, str], None]
LOAD_FORMATS = ("auto", "safetensors", "dummy")
#: The UE8M0 code that means NaN; it never occurs in a sane file (weights.md section 2).
NAN_SCALE = 255
_TORCH_TYPES = {
    StorageType.BF16: torch.bfloat16,
    StorageType.F32: torch.float32,
    StorageType.F8_E4M3: torch.float8_e4m3fn,
    StorageType.F8_E8M0: torch.uint8,
    StorageType.FP4: torch.uint8,
}


def load_weights(
    path: str | Path,
    config: ModelConfig,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    vision: bool = False,
    draft: bool = False,
    engram_tables: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the weights by `--load-format`: from the files of `path`, or random ones (`dummy`).

    Args:
        path: Checkpoint directory; not looked at for `dummy`.
        config: The model.
        load_format: One of `LOAD_FORMATS`; `auto` means safetensors, the only file format there is.
        seed: Seed of the random weights.
        progress: See `Progress`.
        vision: Whether images are served.
        draft: Whether DSpark runs.
        engram_tables: Load the Engram tables too; else they are placed apart (`engram_source.row_source`).

    Raises:
        ConfigError: If the format is unknown.
        CheckpointError: See `load_checkpoint`.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"--load-format {load_format!r} cannot be loaded; choose one of {', '.join(LOAD_FORMATS)}",
            param="load_format",
        )
    if load_format == "dummy":
        logger.info("weights are random (--load-format dummy, seed %d)", seed)
        return random_weights(
            config,
            seed=seed,
            progress=progress,
            vision=vision,
            draft=draft,
            engram_tables=engram_tables,
        )
    return load_checkpoint(
        path,
        config,
        progress=progress,
        vision=vision,
        draft=draft,
        engram_tables=engram_tables,
    )


def load_checkpoint(
    path: str | Path,
    config: ModelConfig,
    *,
    progress: Progress | None = None,
    vision: bool = False,
    draft: bool = False,
    engram_tables: bool = True,
) -> dict[str, torch.Tensor]:
    """Read every tensor the engine needs; the checkpoint must hold exactly the expected ones.

    Args:
        path: Checkpoint directory.
        config: Its configuration.
        progress: Called while bytes arrive, at the start with 0 and at the end with all of them.
        vision: Load `vision.*`, `aligner.*`, `image_*` and `bias_vl` too.
        draft: Load `mtp.*` too.
        engram_tables: Load the Engram tables too.

    Returns:
        Tensor name -> CPU tensor of the shape of `expected_tensors`: bfloat16, float32,
        float8_e4m3fn, or uint8 for UE8M0 scales and packed FP4.

    Raises:
        CheckpointError: If a file is missing, truncated or damaged, or a tensor is missing, unknown,
            duplicate, mis-shaped or mis-typed; the message names tensor, file and remedy.
    """
    expected = expected_tensors(config, vision=vision, draft=draft, engram_tables=engram_tables)
    with Checkpoint(Path(path)) as checkpoint:
        checkpoint.check(expected)
        wanted = {name: spec for name, spec in expected.items() if spec.skip_reason is None}
        _log_skips(expected)
        meter = _Meter(sum(spec.num_bytes for spec in wanted.values()), "loading weights", progress)
        return {name: _read(checkpoint, name, spec, meter) for name, spec in wanted.items()}


def random_weights(
    config: ModelConfig,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    vision: bool = False,
    draft: bool = False,
    engram_tables: bool = True,
) -> dict[str, torch.Tensor]:
    """Return random weights with the names, shapes and types that `load_checkpoint` gives.

    They depend on (configuration, seed) alone and equal those of `dsserve debug make-tiny`.
    """
    expected = expected_tensors(config, vision=vision, draft=draft, engram_tables=engram_tables)
    wanted = {name: spec for name, spec in expected.items() if spec.skip_reason is None}
    meter = _Meter(sum(spec.num_bytes for spec in wanted.values()), "drawing weights", progress)
    result = {}
    for name, tensor in draw_weights(wanted, config, seed=seed):
        result[name] = tensor
        meter.add(tensor.nbytes)
    return result


def byte_view(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the storage of a contiguous CPU tensor as [bytes] uint8, sharing memory."""
    view: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return view


class _Meter:
    """Counts bytes and tells the callback, at most about a hundred times."""

    def __init__(self, total: int, stage: str, progress: Progress | None) -> None:
        self._total, self._stage, self._progress = total, stage, progress
        self._done = self._told = 0
        self._tell()

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._done == self._total or self._done - self._told >= self._total // 100:
            self._tell()

    def _tell(self) -> None:
        self._told = self._done
        if self._progress is not None:
            self._progress(self._done, self._total, self._stage)


def _read(checkpoint: Checkpoint, name: str, spec: TensorSpec, meter: _Meter) -> torch.Tensor:
    file = checkpoint.file(name)
    tensor = torch.empty(spec.shape, dtype=_TORCH_TYPES[spec.dtype])

    def on_chunk(part: NDArray[np.uint8]) -> None:
        if spec.dtype is StorageType.F8_E8M0 and bool((part == NAN_SCALE).any()):
            raise CheckpointError(
                f"{file.path}: tensor {name}: a scale is NaN (byte 255): the file is damaged; copy or download "
                "it again"
            )
        meter.add(len(part))

    file.copy_into(name, byte_view(tensor), on_chunk=on_chunk)
    return tensor


def _log_skips(expected: dict[str, TensorSpec]) -> None:
    counts: dict[str, int] = {}
    for spec in expected.values():
        if spec.skip_reason is not None:
            counts[spec.skip_reason] = counts.get(spec.skip_reason, 0) + 1
    for reason, count in counts.items():
        logger.info("%d tensors not loaded (%s)", count, reason)
