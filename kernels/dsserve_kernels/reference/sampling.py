"""Drawing the next token of each row (serving.md d.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.registry import reference

#: Multipliers of the splitmix64 finaliser, as signed 64-bit numbers.
_MIX_1, _MIX_2, _GOLDEN = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def counter_hash(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """64 well-mixed bits from three counters (int64, broadcast), the same on every device and in every batch."""
    x = seed * _GOLDEN + position
    for salt in (0, index):
        x = (x + salt) * _MIX_1
        x = (x ^ _shift_right(x, 30)) * _MIX_1
        x = (x ^ _shift_right(x, 27)) * _MIX_2
        x = x ^ _shift_right(x, 31)
    return x


def uniform(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Uniform float64 in (0, 1) from `counter_hash`."""
    return (_shift_right(counter_hash(seed, position, index), 12).double() + 0.5) * 2.0**-52


@reference("apply_penalties")
def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits after the three penalties.

    Args:
        logits: [S, V] float32.
        output_counts: [S, V] int32, how often each id was generated.
        in_prompt: [S, V] bool.
        repetition: [S, 1] float32; divides positive and multiplies negative logits of ids seen anywhere.
        presence: [S, 1] float32; subtracted once from generated ids.
        frequency: [S, 1] float32; subtracted once per occurrence.
    """
    generated = output_counts > 0
    factor = torch.where(generated | in_prompt, repetition, torch.ones_like(repetition))
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - presence * generated - frequency * output_counts


@reference("sample")
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Draw one id per row: temperature, then top-k, top-p and min-p on its distribution, then Gumbel-max.

    The noise of an id depends on (seed, position, id) alone, so a row's draw does not depend on its batch.

    Args:
        logits: [S, V] float32, -inf for forbidden ids.
        temperature: [S] float32; 0 = arg-max (ties to the lower id).
        top_k: [S] int64; V or more = all.
        top_p: [S] float32 in (0, 1].
        min_p: [S] float32 in [0, 1]; ids less likely than min_p times the likeliest are dropped.
        seed: [S] int64.
        position: [S] int64 absolute position of the drawn token.

    Returns:
        [S] int64.
    """
    if bool((temperature <= 0).all()):
        return logits.argmax(1)
    return draw_or_choose(logits, temperature, top_k, top_p, min_p, seed, position)


def draw_or_choose(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """`sample` without a look at the numbers: every row is drawn, greedy ones then take their arg-max."""
    greedy = temperature <= 0
    scaled = _scaled(logits, temperature)
    allowed, _ = _truncated(scaled, top_k, top_p, min_p)
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = -torch.log(-torch.log(uniform(seed.unsqueeze(1), position.unsqueeze(1), ids)))
    drawn = (scaled + noise).masked_fill(~allowed, -torch.inf).argmax(1)
    return torch.where(greedy, logits.argmax(1), drawn)


@reference("sampling_distribution")
def sampling_distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """What `sample` draws from: [S, V] float64, one-hot where the temperature is 0. Arguments are those of `sample`."""
    allowed, probabilities = _truncated(_scaled(logits, temperature), top_k, top_p, min_p)
    kept = torch.where(allowed, probabilities, 0.0)
    best = torch.zeros_like(kept).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    return torch.where((temperature <= 0).unsqueeze(1), best, kept / kept.sum(1, keepdim=True))


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits over the temperature, float64; as they are where it is 0."""
    divisor = torch.where(temperature <= 0, 1.0, temperature.double())
    return logits.double() / divisor.unsqueeze(1)


def _truncated(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Which ids may be drawn, and the probabilities before truncation: both [S, V]."""
    probabilities = scaled.softmax(1)
    ordered, ids = torch.sort(probabilities, dim=1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    # An id is kept while the mass before it is below top_p, so at least the likeliest always is.
    kept = (ordered.cumsum(1) - ordered) < top_p.double().unsqueeze(1)
    kept &= rank < top_k.unsqueeze(1)
    kept &= ordered >= min_p.double().unsqueeze(1) * ordered[:, :1]
    kept[:, 0] = True
    allowed = torch.zeros_like(kept).scatter_(1, ids, kept) & (probabilities > 0)
    return allowed, probabilities
