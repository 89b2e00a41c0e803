"""Writes a safetensors file with the type names of the released checkpoint.

The library would name UE8M0 scales and packed FP4 after their torch types, which are plain bytes here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dsserve.models.deepseek_v4.weights import byte_view

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

_ALIGNMENT = 8


def write_safetensors(
    file: Path, tensors: Mapping[str, torch.Tensor], file_types: Mapping[str, str]
) -> dict[str, object]:
    """Write CPU tensors to `file`, widest elements first, so that each one is aligned.

    Args:
        file: Path of the new file.
        tensors: Name -> contiguous tensor.
        file_types: Name -> type name in the header, of the same element size.

    Returns:
        The content of the `model.safetensors.index.json` that goes with the file.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": file_types[name],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name in order:
            stream.write(byte_view(tensors[name]).data)
    return {
        "metadata": {"total_size": position},
        "weight_map": dict.fromkeys(sorted(order), file.name),
    }
