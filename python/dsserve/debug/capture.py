"""Collects intermediate tensors of a forward under the names of the golden files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Collection

#: Kinds whose name carries no layer.
_GLOBAL = ("engram_hash", "dspark_main_hidden")
KINDS = (
    "stream",
    "attn_out",
    "ffn_out",
    "engram_stream",
    "next_pre",
    "topk",
    "index_scores",
    "route_ids",
    "route_w",
    "engram_hash",
    "dspark_main_hidden",
)


class TensorCapture:
    """A `models.deepseek_v4.step.Capture` that keeps everything it is asked for, chunk by chunk."""

    def __init__(self, kinds: Collection[str]) -> None:
        """Record only `kinds`."""
        self._kinds = frozenset(kinds)
        self._pieces: dict[str, list[Tensor]] = {}

    def wants(self, kind: str) -> bool:
        """Whether `kind` was asked for."""
        return kind in self._kinds

    def record(self, kind: str, layer: int, tensor: Tensor, *, is_tail: bool) -> None:
        """Keep a copy of the tensor."""
        name = kind if kind in _GLOBAL else f"layer.{layer}.{kind}"
        self._pieces.setdefault(name, []).append(tensor.clone())

    def tensors(self) -> dict[str, Tensor]:
        """One tensor per name, the rows of all chunks joined; shorter top-k lists and scores are filled up with -1."""
        return {name: _joined(pieces) for name, pieces in self._pieces.items()}


def _joined(pieces: list[Tensor]) -> Tensor:
    if pieces[0].dim() == 2 and len({piece.shape[1] for piece in pieces}) > 1:
        width = max(piece.shape[1] for piece in pieces)
        pieces = [
            torch.nn.functional.pad(piece, (0, width - piece.shape[1]), value=-1)
            for piece in pieces
        ]
    return torch.cat(pieces)
