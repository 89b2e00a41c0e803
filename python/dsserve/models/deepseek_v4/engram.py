"""The Engram of one layer: table look-up by n-gram, gate, and the shared hash (model.md section 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.engram.hashing import EngramConstants
    from dsserve.engram.staging import FetchedRows, StagedRows, Stager
    from dsserve.models.deepseek_v4.params import Params
    from dsserve_kernels.numerics import Numerics
    from dsserve_kernels.select import Operators


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


class EngramRows(Protocol):
    """Table rows of one step, looked up or on their way."""

    def values(self, table: int) -> Tensor:
        """[T, columns * width] of one table, by its position in `engram_layer_ids`."""
        ...


class _NoRows:
    def values(self, table: int) -> Tensor:
        """Refuse."""
        raise RuntimeError(f"no rows of Engram table {table} were looked up")


#: For steps without Engram layers.
NO_ROWS: EngramRows = _NoRows()


class EngramLookup(Protocol):
    """Looks rows up, wherever the tables lie."""

    def start(self, rows: Tensor) -> EngramRows:
        """Begin to look up the rows [T, Engram layers, columns] of a step."""
        ...


class DeviceLookup:
    """Tables in the device's memory: looked up where they are used."""

    def __init__(self, config: ModelConfig, params: Params) -> None:
        """`params` is the view of the whole model."""
        embeds = [params.under(f"layers.{layer}.engram.embed") for layer in config.engram_layer_ids]
        self._tables = [(p.raw("weight"), p.raw("scale").view(torch.uint8)) for p in embeds]
        self._ops, self._dtype = params.ops, params.numerics.act_dtype

    def start(self, rows: Tensor) -> EngramRows:
        """Remember the rows."""
        return _DeviceRows(self._tables, self._ops, self._dtype, rows)


class _DeviceRows:
    def __init__(
        self,
        tables: list[tuple[Tensor, Tensor]],
        ops: Operators,
        dtype: torch.dtype,
        rows: Tensor,
    ) -> None:
        self._tables, self._ops, self._dtype, self._rows = tables, ops, dtype, rows

    def values(self, table: int) -> Tensor:
        """Look one table's rows up."""
        codes, scales = self._tables[table]
        result: Tensor = self._ops.engram_gather(codes, scales, self._rows[:, table], self._dtype)
        return result


class StagedLookup:
    """Tables elsewhere: a thread fetches the rows while other layers run."""

    def __init__(
        self, stager: Stager, ops: Operators, numerics: Numerics, device: torch.device
    ) -> None:
        """Hand on what `stager` fetches to `device`."""
        self._stager, self._ops = stager, ops
        self._dtype, self._device = numerics.act_dtype, device

    def start(self, rows: Tensor) -> EngramRows:
        """Begin to fetch."""
        return self.attach(self._stager.start(rows.cpu().numpy()))

    def attach(self, staged: StagedRows) -> EngramRows:
        """Take rows whose fetching began earlier."""
        return _StagedValues(self, staged)

    def widen(self, fetched: FetchedRows) -> Tensor:
        """Values [T, columns * width] of fetched rows."""
        codes, scales, index = (
            torch.from_numpy(array).to(self._device)
            for array in (fetched.codes, fetched.scales, fetched.index)
        )
        result: Tensor = self._ops.engram_gather(
            codes.view(torch.float8_e4m3fn), scales, index, self._dtype
        )
        return result


class _StagedValues:
    def __init__(self, lookup: StagedLookup, staged: StagedRows) -> None:
        self._lookup, self._staged = lookup, staged

    def values(self, table: int) -> Tensor:
        """Wait for one table's rows."""
        return self._lookup.widen(self._staged.take(table))


class Engram:
    """Projection and gate of one Engram layer."""

    def __init__(self, params: Params) -> None:
        """`params` is the view of the layer's `engram`."""
        self._ops = params.ops
        self._project = params.fp8_linear("wkv")
        self._q_weight, self._k_weight = params.float32("q_weight"), params.float32("k_weight")

    def forward(self, streams: Tensor, looked_up: Tensor) -> Tensor:
        """Streams [T, n, D] after the Engram write; `looked_up` [T, columns * width] of this layer's table."""
        result: Tensor = self._ops.engram_gate(
            streams, self._project(looked_up), self._q_weight, self._k_weight, None
        )
        return result
