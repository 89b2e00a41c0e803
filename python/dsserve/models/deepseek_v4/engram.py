"""The Engram of one layer: table look-up by n-gram, gate, and the shared hash (model.md section 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.engram.hashing import EngramConstants
    from dsserve.models.deepseek_v4.params import Params


class EngramHash:
    """Row ids of every token in every Engram table; computed once per step from token ids alone."""

    def __init__(self, config: ModelConfig, constants: EngramConstants, params: Params) -> None:
        """Put the constants on the device."""
        self._ops = params.ops

        def put(array: object) -> Tensor:
            return torch.as_tensor(array, dtype=torch.int64, device=params.device)

        self._token_map = put(constants.token_map)
        self._multipliers = put(constants.multipliers)
        self._primes = put(constants.primes)
        self._offsets = put(constants.offsets)
        self._pad_id = config.engram_pad_token_id

    def rows(self, history: Tensor) -> Tensor:
        """[T, N] raw ids of p, p-1, .. (-1 = blocked) -> [T, Engram layers, columns]."""
        result: Tensor = self._ops.engram_hash(
            history, self._token_map, self._multipliers, self._primes, self._offsets, self._pad_id
        )
        return result


class Engram:
    """Look-up and gate of one Engram layer."""

    def __init__(self, params: Params) -> None:
        """`params` is the view of the layer's `engram`."""
        self._ops = params.ops
        self._dtype = params.numerics.act_dtype
        self._codes = params.raw("embed.weight")
        self._scales = params.raw("embed.scale").view(torch.uint8)
        self._project = params.fp8_linear("wkv")
        self._q_weight, self._k_weight = params.float32("q_weight"), params.float32("k_weight")

    def forward(self, streams: Tensor, rows: Tensor) -> Tensor:
        """Streams [T, n, D] after the Engram write; `rows` [T, columns] of this table."""
        looked_up = self._ops.engram_gather(self._codes, self._scales, rows, self._dtype)
        result: Tensor = self._ops.engram_gate(
            streams, self._project(looked_up), self._q_weight, self._k_weight, None
        )
        return result
