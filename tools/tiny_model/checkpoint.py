"""Masters between runs: BF16 (statistics and gates float32), split into files of a bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from pathlib import Path

_FILE_BYTES = 15_000_000


def save_masters(folder: Path, name: str, masters: dict[str, Tensor]) -> None:
    """Write `NAME-0.safetensors` and so on; matrices in BF16, vectors and mHC in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Tensor]] = [{}]
    used = 0
    for key, master in masters.items():
        keeps = master.dim() <= 2 or ".hc_" in key
        tensor = master.detach().cpu().to(torch.float32 if keeps else torch.bfloat16).contiguous()
        if used + tensor.nbytes > _FILE_BYTES:
            files.append({})
            used = 0
        files[-1][key] = tensor
        used += tensor.nbytes
    for index, tensors in enumerate(files):
        save_file(tensors, folder / f"{name}-{index}.safetensors")


def load_masters(folder: Path, name: str) -> dict[str, Tensor]:
    """Float32 masters of `save_masters`.

    Raises:
        FileNotFoundError: If there are none.
    """
    masters: dict[str, Tensor] = {}
    files = sorted(folder.glob(f"{name}-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no {name}-*.safetensors in {folder}")
    for file in files:
        masters.update({key: tensor.float() for key, tensor in load_file(file).items()})
    return masters
