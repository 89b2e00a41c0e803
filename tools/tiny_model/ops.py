"""Small functions of the training forward; `enable_compile` fuses each of them on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tools.tiny_model import quantise
from torch import Tensor
from torch.nn.functional import softplus

if TYPE_CHECKING:
    from collections.abc import Callable

_STAT_EPS = 1e-20
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_is_compiling = False


def enable_compile() -> None:
    """Compile every function of this module at its first call."""
    global _is_compiling
    _is_compiling = True
    # One function meets many shapes; each is compiled once.
    torch._dynamo.config.cache_size_limit = 256
    torch._dynamo.config.accumulated_cache_size_limit = 4096


def disable_compile() -> None:
    """Run the functions as they stand from now on (evaluation: few calls of many shapes)."""
    global _is_compiling
    _is_compiling = False


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is compiled if compilation is on."""

    def call(*arguments: Any) -> Any:
        if not _is_compiling:
            return function(*arguments)
        if function not in _compiled:
            _compiled[function] = torch.compile(function, dynamic=False)
        return _compiled[function](*arguments)

    return call


_fp8_rows = fused(quantise.fp8_rows)
_fp4_index = fused(quantise.fp4_index)
_fp4_main = fused(quantise.fp4_main)


def q8(x: Tensor) -> Tensor:
    """`Q8`, straight through."""
    return quantise.straight_through(x, _fp8_rows)


def q4_index(x: Tensor) -> Tensor:
    """`Q4i`, straight through."""
    return quantise.straight_through(x, _fp4_index)


def q4_main(x: Tensor) -> Tensor:
    """`Q4k`, straight through."""
    return quantise.straight_through(x, _fp4_main)


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with one rounding."""
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


@fused
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last features of x; cos and sin broadcast against [.., pairs]."""
    rotated = cos.shape[-1] * 2
    a, b = x[..., -rotated:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-rotated], turned.to(x.dtype)), -1)


@fused
def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The streams' weighted sum, rounded, then RMSNorm."""
    mixed = (pre.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype).float()
    return (weight * (mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps))).to(
        streams.dtype
    )


@fused
def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """The streams' weighted sum, rounded once."""
    return (pre.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)


@fused
def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams after a sublayer."""
    mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(streams.dtype)


@fused
def inverse_rms(streams: Tensor) -> Tensor:
    """[T, n, D] -> [T, 1], one statistic over all streams."""
    return torch.rsqrt(streams.float().square().mean((-2, -1)).unsqueeze(-1) + _STAT_EPS)


@fused
def split_mixes(
    z: Tensor, base: Tensor, scale: Tensor, n: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates, and the mixing matrix before its balancing rounds (one column normalisation done)."""
    pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (z[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
    return pre, post, comb / (comb.sum(1, keepdim=True) + eps)


@fused
def balance(comb: Tensor, eps: float) -> Tensor:
    """One Sinkhorn round: rows, then columns."""
    comb = comb / (comb.sum(2, keepdim=True) + eps)
    return comb / (comb.sum(1, keepdim=True) + eps)


@fused
def route_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus) of router logits."""
    return softplus(logits).sqrt()


@fused
def swiglu(u: Tensor, v: Tensor, gates: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU of all experts side by side: u, v [T, E, F], gates [T, E]; 0 for experts not chosen."""
    wide_u, wide_v = u.float().clamp_max(limit), v.float().clamp(-limit, limit)
    return (gates.unsqueeze(-1) * (torch.nn.functional.silu(wide_u) * wide_v)).to(u.dtype)


@fused
def pool_pairs(u: Tensor, g: Tensor) -> Tensor:
    """Softmax over two tokens per channel: [.., 2, d] -> [.., d] float32."""
    return (g.softmax(-2) * u).sum(-2)


@fused
def engram_gate(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
    """Add the gated value to every stream: streams [T, n, D], kv [T, (n + 1) D]."""
    n, dim = streams.shape[-2:]
    wide = streams.float()
    keys = kv[:, : n * dim].unflatten(-1, (n, dim)).float()
    value = kv[:, n * dim :].float()
    dot = (wide * (q_weight * k_weight) * keys).sum(-1) * dim**-0.5
    dot = (
        dot
        * torch.rsqrt(wide.square().mean(-1) + _STAT_EPS)
        * torch.rsqrt(keys.square().mean(-1) + _STAT_EPS)
    )
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (wide + gate.unsqueeze(-1) * value.unsqueeze(-2)).to(streams.dtype)


@fused
def _attend_forward(
    sw: Tensor, sc: Tensor, mw: Tensor, mc: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    w = torch.where(mw, sw.float() * scale, -torch.inf)
    c = torch.where(mc, sc.float() * scale, -torch.inf)
    top = torch.maximum(w.amax(-1, keepdim=True), c.amax(-1, keepdim=True))
    ew, ec, es = (w - top).exp(), (c - top).exp(), (sink - top).exp()
    total = ew.sum(-1, keepdim=True) + ec.sum(-1, keepdim=True) + es
    return (ew / total).to(sw.dtype), (ec / total).to(sc.dtype), es / total


@fused
def _attend_backward(
    pw: Tensor, pc: Tensor, ps: Tensor, gw: Tensor, gc: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    w, c, dw, dc = pw.float(), pc.float(), gw.float(), gc.float()
    mean = (w * dw).sum(-1, keepdim=True) + (c * dc).sum(-1, keepdim=True)
    return (
        (w * (dw - mean) * scale).to(pw.dtype),
        (c * (dc - mean) * scale).to(pc.dtype),
        -(ps * mean),
    )


@fused
def _attend_forward_window(
    sw: Tensor, mw: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    w = torch.where(mw, sw.float() * scale, -torch.inf)
    top = w.amax(-1, keepdim=True)
    ew, es = (w - top).exp(), (sink - top).exp()
    total = ew.sum(-1, keepdim=True) + es
    return (ew / total).to(sw.dtype), es / total


@fused
def _attend_backward_window(
    pw: Tensor, ps: Tensor, gw: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    w, dw = pw.float(), gw.float()
    mean = (w * dw).sum(-1, keepdim=True)
    return (w * (dw - mean) * scale).to(pw.dtype), -(ps * mean)


class _Attend(torch.autograd.Function):
    """Softmax over window keys, compressed keys and the sink."""

    @staticmethod
    def forward(
        ctx: Any, sw: Tensor, sc: Tensor, mw: Tensor, mc: Tensor, sink: Tensor, scale: float
    ) -> Any:
        pw, pc, ps = _attend_forward(sw, sc, mw, mc, sink, scale)
        ctx.save_for_backward(pw, pc, ps)
        ctx.scale = scale
        return pw, pc

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        pw, pc, ps = ctx.saved_tensors
        dw, dc, ds = _attend_backward(pw, pc, ps, *gradients, ctx.scale)
        return dw, dc, None, None, ds.sum((0, 1)), None


class _AttendWindow(torch.autograd.Function):
    """Softmax over window keys and the sink."""

    @staticmethod
    def forward(ctx: Any, sw: Tensor, mw: Tensor, sink: Tensor, scale: float) -> Any:
        pw, ps = _attend_forward_window(sw, mw, sink, scale)
        ctx.save_for_backward(pw, ps)
        ctx.scale = scale
        return pw

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        pw, ps = ctx.saved_tensors
        dw, ds = _attend_backward_window(pw, ps, gradients[0], ctx.scale)
        return dw, None, ds.sum((0, 1)), None


def attend(
    sw: Tensor, sc: Tensor, mw: Tensor, mc: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Weights of window and compressed keys.

    Args:
        sw: [B, T, H, 2W] window scores.
        sc: [B, T, H, N] scores of compressed rows.
        mw: [B, T, 1, 2W] bool.
        mc: [B, T, 1, N] bool.
        sink: [H, 1].
        scale: Factor of the scores.
    """
    pw, pc = _Attend.apply(sw, sc, mw, mc, sink, scale)
    return pw, pc


def attend_window(sw: Tensor, mw: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Weights of window keys alone; see `attend`."""
    result: Tensor = _AttendWindow.apply(sw, mw, sink, scale)
    return result


def dense_weights(
    sw: Tensor, sc: Tensor, mw: Tensor, mc: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """Attention on compressed rows without selection, summed over heads: [B, t, N] float32, no gradient."""
    with torch.no_grad():
        result: Tensor = _attend_forward(sw, sc, mw, mc, sink, scale)[1].float().sum(2)
    return result


@fused
def index_scores(dots: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """Sum over heads of weight * relu(dot): [B, t, h, N], [B, t, h] -> [B, t, N] float32, -inf where hidden."""
    scores = (torch.relu(dots.float()) * weights.float().unsqueeze(-1)).sum(2)
    return torch.where(visible, scores, -torch.inf)


@fused
def index_loss(scores: Tensor, target: Tensor) -> Tensor:
    """KL of the attention distribution against the softmax of the index scores, rows weighted by their mass."""
    mass = target.sum(-1)
    log_q = torch.where(target > 0, torch.log_softmax(scores, -1), 0.0)
    cross = -(target * log_q).sum(-1)
    entropy = -torch.where(
        target > 0,
        target * (target / mass.unsqueeze(-1).clamp_min(1e-9)).clamp_min(1e-20).log(),
        0.0,
    ).sum(-1)
    return (cross - entropy).sum() / mass.sum().clamp_min(1e-9)


@fused
def token_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and whether the arg-max is right, per row."""
    wide = logits.float()
    picked = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(wide, -1) - picked, (wide.argmax(-1) == targets)


class _Lookup(torch.autograd.Function):
    """Rows of a table; the gradient is summed in float32."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return table[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (rows,) = ctx.saved_tensors
        gradient = gradients[0].float().reshape(rows.numel(), -1)
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        return total.index_add_(0, rows.reshape(-1), gradient).to(ctx.dtype), None


def lookup(table: Tensor, rows: Tensor) -> Tensor:
    """`table[rows]` with a backward that suits a CUDA graph."""
    result: Tensor = _Lookup.apply(table, rows)
    return result
