"""Sparse attention over window rows and selected compressed rows, with a sink (model.md section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.kvcache import load_main_rows
from dsserve_kernels.registry import reference

#: Rows handled at once: bounds the memory of the gathered keys.
ROW_BLOCK = 32


@reference("sparse_attention")
def sparse_attention(
    q: Tensor,
    window_rows: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    *,
    scale: float,
    round_weights: bool,
) -> Tensor:
    """Attention of each query over its own key set; the same row is key and value.

    Scores, exponentials, sums and the division are float64. With `round_weights`, exp(s - M) is rounded to BF16
    before it multiplies the values, while the denominator sums the unrounded ones; M leaves the sink out.

    Args:
        q: [T, H, d] activation after RoPE.
        window_rows: [R, d] window rows of the step, old ones and new ones.
        window_index: [T, W] int64 into `window_rows`, -1 = none, otherwise distinct within a row.
        main_pool: Native compressed rows of the KV source, or None in a window-only layer.
        main_index: [T, K] int64 into `main_pool`, -1 = none, otherwise distinct within a row.
        sink: [H] float32; a key without a value.
        scale: Factor of the scores.
        round_weights: See above.

    Returns:
        [T, H, d] in the dtype of `q`; zeros where a row has no key.
    """
    out = torch.empty_like(q)
    # -1 reads the zero row behind the last: a weight of 0 does not cancel what another row may hold (NaN).
    rows64 = torch.nn.functional.pad(window_rows.double(), (0, 0, 0, 1))
    for start in range(0, q.shape[0], ROW_BLOCK):
        block = slice(start, start + ROW_BLOCK)
        index = window_index[block]
        valid = index >= 0
        keys = rows64[index]
        if main_pool is not None and main_index is not None:
            chosen = main_index[block]
            keys = torch.cat((keys, load_main_rows(main_pool, chosen, torch.float64)), dim=1)
            valid = torch.cat((valid, chosen >= 0), dim=1)
        out[block] = _attend(q[block], keys, valid, sink, scale, round_weights)
    return out


def _attend(
    q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float, round_weights: bool
) -> Tensor:
    """One block: q [t, H, d], keys [t, K, d] float64, valid [t, K]."""
    scores = torch.bmm(q.double(), keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink.double().view(1, -1, 1) - top).exp()
    if round_weights:
        weights = weights.to(torch.bfloat16).double()
    return (torch.bmm(weights, keys) / total).to(q.dtype)
