"""Attention of a few rows over whole window rings, whose values are kept decoded; bit-equal to the chain.

A request's keys are its new rows, the used part of its ring in the ring's order, and the compressed rows that each of
its rows chose. What a row must not see has a weight of zero. The order of the keys differs from that of the chain: it
matters to the last bits of float64 sums alone, which are rounded to BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve_kernels.arrays import register
from dsserve_kernels.fused import chains
from dsserve_kernels.fused.values import is_few, round_bf16, to_bf16, to_float32
from dsserve_kernels.kvcache.numpy_rows import main_values, window_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dsserve_kernels.arrays import Float32, Float64
    from dsserve_kernels.attention.window_index import WindowIndex
    from dsserve_kernels.kvcache.decoded_rings import DecodedRings, Ring
    from dsserve_kernels.select import Operators

#: New rows of one request up to which its ring is used.
_MAX_NEW_ROWS = 16


@dataclass(slots=True)
class _Request:
    """Consecutive rows of one request.

    Attributes:
        rows: Where they are among the rows of the call.
        ring: Number of its ring.
        num_used: Rows of the ring, from its start, that contain all of its context.
        hidden: [n, 1, n + used] keys that each row does not see, or None if it sees all.
    """

    rows: slice
    ring: int
    num_used: int
    hidden: NDArray[np.bool_] | None

    def sees(self, marked: NDArray[np.bool_]) -> bool:
        """Whether a row of the request sees a marked row [ring rows] of its ring."""
        seen = marked[: self.num_used]
        if self.num_used and self.hidden is not None:
            seen = seen & ~self.hidden[:, 0, -self.num_used :]
        return bool(seen.any())


def window_attention(
    ops: Operators,
    q: Tensor,
    latent: Tensor,
    pool: Tensor,
    index: WindowIndex,
    rings: DecodedRings | None,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    *,
    scale: float,
    round_weights: bool,
) -> Tensor:
    """See `chains.window_attention`."""
    rows = _in_rings(q, latent, pool, index, rings) if round_weights else None
    if rows is None:
        return chains.window_attention(
            ops,
            q,
            latent,
            pool,
            index,
            rings,
            main_pool,
            main_index,
            sink,
            scale=scale,
            round_weights=round_weights,
        )
    main = None
    if main_pool is not None and main_index is not None and main_index.numel():
        main = _selected(index, main_pool, main_index)
    attention = _Attention(q, sink, scale, index)
    for request, ring in zip(rows.requests, rows.rings, strict=True):
        attention.run(request, ring.values, rows.values, main)
    rows.store(pool.numpy(), index)
    return to_bf16(attention.out)


@dataclass(slots=True)
class _NewRows:
    """The new window rows of a call, and the rings of its requests."""

    requests: list[_Request]
    rings: list[Ring]
    raw: NDArray[np.uint8]
    values: Float32

    def store(self, pool: NDArray[np.uint8], index: WindowIndex) -> None:
        """Write the new rows to the pool and to the rings."""
        where: list[int] = index.prepared["store"]
        for request, ring in zip(self.requests, self.rings, strict=True):
            for row in range(request.rows.start, request.rows.stop):
                place = where[row]
                if place >= 0:
                    pool[place] = self.raw[row]
                    ring.put(place % index.ring_rows, self.raw[row], self.values[row])


def _in_rings(
    q: Tensor, latent: Tensor, pool: Tensor, index: WindowIndex, rings: DecodedRings | None
) -> _NewRows | None:
    """The rows of a call whose keys all lie in few rings and are finite numbers; otherwise None."""
    requests = _requests(index) if rings is not None and is_few(q) else None
    if requests is None or rings is None or len(requests) > rings.max_rings:
        return None
    raw, values = window_rows(to_float32(latent))
    if not np.isfinite(np.add.reduce(values, None)):
        return None
    stored = pool.numpy()
    found = [rings.ring(stored, request.ring) for request in requests]
    for request, ring in zip(requests, found, strict=True):
        if ring.num_broken and request.sees(ring.is_broken):
            return None
    return _NewRows(requests, found, raw, values)


class _Attention:
    """The queries of a call, and their results one request after the other."""

    def __init__(self, q: Tensor, sink: Tensor, scale: float, index: WindowIndex) -> None:
        self._q: Float64 = q.double().numpy()
        self._sink: Float64 = sink.double().numpy()[:, None]
        self._scale = scale
        # Used again by each request of each layer, so that its memory stays in the cache.
        scratch = index.prepared.get("scratch")
        if scratch is None:
            size = (_MAX_NEW_ROWS + index.ring_rows, q.shape[2])
            scratch = index.prepared["scratch"] = torch.empty(size, dtype=torch.float64)
        self._scratch: Tensor = scratch
        self._keys: Float64 = self._scratch.numpy()
        self.out = np.empty(self._q.shape)

    def run(
        self,
        request: _Request,
        ring: Tensor,
        new: Float32,
        main: tuple[Float64, NDArray[np.bool_] | None] | None,
    ) -> None:
        """Attention of the request's rows; `main` holds keys [T, K, d] of all rows and which are none [T, K]."""
        rows = request.rows
        q = self._q[rows]
        count, heads, dim = q.shape
        num_keys = count + request.num_used
        keys = self._keys[:num_keys]
        keys[:count] = new[rows]
        self._scratch[count:num_keys].copy_(ring[: request.num_used])
        scores = np.matmul(q.reshape(count * heads, dim), keys.T).reshape(count, heads, -1)
        if request.hidden is not None:
            np.copyto(scores, -np.inf, where=request.hidden)
        if main is None:
            weights, total = self._weights(scores)
            out = _weighted(weights, keys)
        else:
            chosen, is_none = main[0][rows], main[1]
            others = np.matmul(q, chosen.transpose(0, 2, 1))
            if is_none is not None:
                np.copyto(others, -np.inf, where=is_none[rows][:, None])
            weights, total = self._weights(np.concatenate((scores, others), 2))
            out = _weighted(weights[:, :, :num_keys], keys)
            np.add(out, np.matmul(weights[:, :, num_keys:], chosen), out)
        np.divide(out, total, self.out[rows])

    def _weights(self, scores: Float64) -> tuple[Float64, Float64]:
        """Rounded exponentials of [n, H, K] products, which are overwritten, and the sum of the unrounded ones."""
        np.multiply(scores, self._scale, scores)
        top = np.maximum.reduce(scores, 2, keepdims=True)
        np.subtract(scores, top, scores)
        weights = np.exp(scores, scores)
        total = np.add.reduce(weights, 2, keepdims=True)
        np.add(total, np.exp(self._sink - top), total)
        return round_bf16(weights.astype(np.float32)).astype(np.float64), total


def _weighted(weights: Float64, keys: Float64) -> Float64:
    """[n, H, K] times [K, d], all rows at once."""
    count, heads, num_keys = weights.shape
    out: Float64 = np.matmul(weights.reshape(count * heads, num_keys), keys)
    return out.reshape(count, heads, -1)


def _selected(
    index: WindowIndex, pool: Tensor, chosen: Tensor
) -> tuple[Float64, NDArray[np.bool_] | None]:
    """Values of the chosen compressed rows [T, K, d], zeros for "none", and where that is; once per selection."""
    known = index.prepared.get("main")
    if known is None or known[0] is not pool or known[1] is not chosen:
        where = chosen.numpy()
        missing = where < 0
        values = main_values(pool.numpy(), where)
        if missing.any():
            values[missing] = 0
        known = index.prepared["main"] = (
            pool,
            chosen,
            (values, missing if missing.any() else None),
        )
    result: tuple[Float64, NDArray[np.bool_] | None] = known[2]
    return result


def _requests(index: WindowIndex) -> list[_Request] | None:
    """The requests of a call, or None if their keys do not lie in rings; found once for all layers."""
    prepared = index.prepared
    if "requests" not in prepared:
        prepared["store"] = index.window_store.tolist()
        prepared["requests"] = _find_requests(index)
    requests: list[_Request] | None = prepared["requests"]
    return requests


def _find_requests(index: WindowIndex) -> list[_Request] | None:
    seen, context = index.window_index.numpy(), index.context_index.numpy()
    num_context, ring_rows = len(context), index.ring_rows
    is_new = seen >= num_context
    is_old = (seen >= 0) & ~is_new
    old = context[np.where(is_old, seen, 0)] if num_context else seen
    if (old[is_old] < 0).any():
        return None
    store, request = index.window_store.numpy(), index.row_request.numpy()
    starts = np.flatnonzero(np.diff(request, prepend=-1)).tolist()
    found = []
    for first, last in zip(starts, [*starts[1:], len(request)], strict=True):
        count = last - first
        if count > _MAX_NEW_ROWS:
            return None
        rows, places = np.nonzero(is_old[first:last])
        ring_row = old[first:last][rows, places]
        own_rows, own_places = np.nonzero(is_new[first:last])
        own = seen[first:last][own_rows, own_places] - num_context - first
        # Without a context, the ring that the new rows go to.
        place = int(ring_row[0]) if len(ring_row) else max(int(store[first]), 0)
        ring = place // ring_rows
        inside = ring_row - ring * ring_rows
        kept = store[first:last] - ring * ring_rows
        kept = kept[store[first:last] >= 0]
        if any(
            _is_outside(part, end)
            for part, end in ((inside, ring_rows), (kept, ring_rows), (own, count))
        ):
            return None
        num_used = int(inside.max()) + 1 if len(inside) else 0
        hidden = np.ones((count, 1, count + num_used), dtype=np.bool_)
        hidden[own_rows, 0, own] = False
        hidden[rows, 0, count + inside] = False
        if hidden.all(2).any():
            return None
        found.append(_Request(slice(first, last), ring, num_used, hidden if hidden.any() else None))
    return found


def _is_outside(numbers: NDArray[np.int64], end: int) -> bool:
    return bool(((numbers < 0) | (numbers >= end)).any())


register(window_attention, ("released",))
