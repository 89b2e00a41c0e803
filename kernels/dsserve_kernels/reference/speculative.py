"""Accepting draft tokens and sharing out how many are verified (dspark.md sections 3 and 4).

B requests, G = drafts of a block, V = vocabulary. All counts stay on the device; shapes are the host's. Random numbers
come from counters: (seed, position of the anchor, what the number is for), so a request's result does not depend on
its batch, and each round, which has an anchor of its own, has fresh ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsserve_kernels.reference.sampling import uniform
from dsserve_kernels.registry import reference

#: Counter ranges of the random numbers, apart from each other and from the ids (0 and up) that plain draws count by.
_SPAN = 1 << 32
_DRAFT, _ACCEPT, _RESIDUAL, _SIMULATE = -1 << 40, -2 << 40, -3 << 40, -4 << 40


@reference("accept_draws")
def accept_draws(drafts: Tensor, drawn: Tensor, num_drafts: Tensor) -> Tensor:
    """Length of the longest prefix of drafts that equals what the target drew.

    Exact for every way to draft: the output is what the target draws, row by row.

    Args:
        drafts: [B, G] int64.
        drawn: [B, G + 1] int64, the target's token behind the anchor and behind each draft.
        num_drafts: [B] int64, drafts that count.

    Returns:
        [B] int64, accepted drafts.
    """
    place = torch.arange(drafts.shape[1], device=drafts.device)
    is_same = (drafts == drawn[:, :-1]) & (place < num_drafts.unsqueeze(1))
    return is_same.long().cumprod(1).sum(1)


@reference("draw_drafts")
def draw_drafts(
    logits: Tensor, temperature: Tensor, seed: Tensor, anchor: Tensor, place: int
) -> Tensor:
    """Draw draft number `place` of each request from softmax(logits / temperature), arg-max at temperature 0.

    Args:
        logits: [B, V] float32.
        temperature: [B] float32.
        seed: [B] int64.
        anchor: [B] int64, position of the anchor.
        place: 0 for the first draft.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    counter = _DRAFT - place * _SPAN - ids
    noise = _gumbel(seed.unsqueeze(1), anchor.unsqueeze(1), counter)
    is_greedy = (temperature <= 0).unsqueeze(1)
    scaled = logits.double() / torch.where(is_greedy, 1.0, temperature.double().unsqueeze(1))
    return torch.where(is_greedy, scaled, scaled + noise).argmax(1)


@reference("draft_distribution")
def draft_distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """What `draw_drafts` draws from: [B, G, V] float64; one-hot at temperature 0.

    Args:
        logits: [B, G, V] float32.
        temperature: [B] float32.
    """
    is_greedy = (temperature <= 0).view(-1, 1, 1)
    scaled = logits.double() / torch.where(is_greedy, 1.0, temperature.double().view(-1, 1, 1))
    return torch.where(is_greedy, one_hot(logits.argmax(-1), logits.shape[-1]), scaled.softmax(-1))


def one_hot(ids: Tensor, size: int) -> Tensor:
    """[..] -> [.., size] float64."""
    zeros = torch.zeros(*ids.shape, size, dtype=torch.float64, device=ids.device)
    return zeros.scatter_(-1, ids.unsqueeze(-1), 1.0)


@reference("accept_sampled")
def accept_sampled(
    drafts: Tensor,
    target: Tensor,
    draft: Tensor,
    num_drafts: Tensor,
    seed: Tensor,
    anchor: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: accept draft i with probability min(1, p_i / q_i), else draw from max(p_i - q_i, 0).

    Args:
        drafts: [B, G] int64, drawn from `draft`.
        target: [B, G + 1, V] float64 distributions p behind the anchor and behind each draft.
        draft: [B, G, V] float64 distributions q; what is NaN or outside of [0, 1] counts as 0.
        num_drafts: [B] int64, drafts that count; behind the last of them the token comes from p itself.
        seed: [B] int64.
        anchor: [B] int64, position of the anchor.

    Returns:
        Accepted drafts [B] and the token behind them [B], int64.
    """
    draft = _clean(draft)
    chance = uniform(seed.unsqueeze(1), anchor.unsqueeze(1), _ACCEPT - _places(drafts))
    p = target[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)
    q = draft.gather(2, drafts.unsqueeze(2)).squeeze(2)
    is_accepted = (q > 0) & (chance * q < p) & (_places(drafts) < num_drafts.unsqueeze(1))
    accepted = is_accepted.long().cumprod(1).sum(1)
    bonus = _behind(target, draft, accepted, num_drafts, torch.ones_like(p[:, :1]), seed, anchor)
    return accepted, bonus


@reference("accept_block")
def accept_block(
    drafts: Tensor,
    target: Tensor,
    draft: Tensor,
    num_drafts: Tensor,
    seed: Tensor,
    anchor: Tensor,
) -> tuple[Tensor, Tensor]:
    """Block verification: prefixes are accepted jointly; as exact as `accept_sampled`, and no shorter on average.

    Arguments and results are those of `accept_sampled`. Source: arXiv 2403.10444, algorithm 2.
    """
    draft = _clean(draft)
    batch, length = drafts.shape
    p = target[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)
    q = draft.gather(2, drafts.unsqueeze(2)).squeeze(2)
    ratio = torch.where(q > 0, p / torch.where(q > 0, q, 1.0), torch.zeros_like(p))
    weights = [torch.ones(batch, dtype=torch.float64, device=drafts.device)]
    for place in range(length):
        weights.append((weights[-1] * ratio[:, place]).clamp(max=1.0))
    joint = torch.stack(weights, dim=1)
    # Mass of the residual behind each prefix that has a draft behind it.
    mass = (joint[:, :-1].unsqueeze(2) * target[:, :-1] - draft).clamp_min(0).sum(2)
    rest = mass + 1 - joint[:, :-1]
    partial = torch.where(rest > 0, mass / torch.where(rest > 0, rest, 1.0), torch.zeros_like(mass))
    prefix = torch.arange(1, length + 1, device=drafts.device)
    is_whole = prefix == num_drafts.unsqueeze(1)
    partial = torch.cat((partial[:, 1:], joint[:, -1:]), dim=1)
    bound = torch.where(is_whole, joint[:, 1:], partial)
    chance = uniform(seed.unsqueeze(1), anchor.unsqueeze(1), _ACCEPT - _places(drafts))
    is_accepted = (chance < bound) & (prefix <= num_drafts.unsqueeze(1))
    accepted = (is_accepted.long() * prefix).amax(1)
    share = joint.gather(1, accepted.unsqueeze(1))
    bonus = _behind(target, draft, accepted, num_drafts, share, seed, anchor)
    return accepted, bonus


@reference("simulate_accepted")
def simulate_accepted(mean: Tensor, num_drafts: Tensor, seed: Tensor, anchor: Tensor) -> Tensor:
    """Accepted drafts [B] of a benchmark, whatever the target says: the two whole numbers around the mean, mixed.

    Args:
        mean: [B] float64, accepted drafts on average.
        num_drafts: [B] int64, no more than these.
        seed: [B] int64.
        anchor: [B] int64, position of the anchor.
    """
    least = mean.floor()
    is_more = uniform(seed, anchor, torch.full_like(seed, _SIMULATE)) < mean - least
    return torch.minimum(least.long() + is_more, num_drafts)


@reference("allocate_drafts")
def allocate_drafts(survival: Tensor, limits: Tensor, budget: int) -> Tensor:
    """How many drafts of each request are verified: the `budget` likeliest of all (dspark.md section 4).

    Ties go to the lower place, then to the first request. Whether a draft is verified does not depend on the draft
    itself: its own survival ranks behind those of the drafts before it.

    Args:
        survival: [B, G] float32, chance that the draft and all before it are accepted; falls along a row.
        limits: [B] int64, drafts that a request has.
        budget: Drafts to verify, at most the sum of the limits.

    Returns:
        [B] int64.
    """
    batch, length = survival.shape
    place = torch.arange(length, device=survival.device)
    # A NaN would rank first; a rise along a row would leave a gap.
    falling = torch.nan_to_num(survival, nan=0.0).cummin(1).values
    ranked = falling.masked_fill(place >= limits.unsqueeze(1), -1.0)
    order = ranked.T.reshape(-1).sort(descending=True, stable=True).indices[:budget]
    counts = torch.zeros(batch, dtype=torch.int64, device=survival.device)
    return counts.index_add_(0, order % batch, torch.ones_like(order))


def _places(drafts: Tensor) -> Tensor:
    return torch.arange(drafts.shape[1], device=drafts.device)


def _clean(draft: Tensor) -> Tensor:
    return torch.where((draft >= 0) & (draft <= 1), draft, 0.0)


def _gumbel(seed: Tensor, position: Tensor, counter: Tensor) -> Tensor:
    return -torch.log(-torch.log(uniform(seed, position, counter)))


def _behind(
    target: Tensor,
    draft: Tensor,
    accepted: Tensor,
    num_drafts: Tensor,
    share: Tensor,
    seed: Tensor,
    anchor: Tensor,
) -> Tensor:
    """The token behind the accepted drafts: from max(share * p - q, 0) after a rejection, else from p."""
    batch, vocab = target.shape[0], target.shape[2]
    row = accepted.view(batch, 1, 1).expand(-1, 1, vocab)
    p = target.gather(1, row).squeeze(1)
    padded = torch.nn.functional.pad(draft, (0, 0, 0, 1))
    q = padded.gather(1, row).squeeze(1)
    residual = (share * p - q).clamp_min(0)
    is_rejected = (accepted < num_drafts).unsqueeze(1) & (residual.sum(1, keepdim=True) > 0)
    wanted = torch.where(is_rejected, residual, p)
    ids = torch.arange(vocab, device=target.device)
    noise = _gumbel(seed.unsqueeze(1), anchor.unsqueeze(1), _RESIDUAL - ids)
    return (wanted.log() + noise).masked_fill(wanted <= 0, -torch.inf).argmax(1)
