"""The sampler against naive distributions, and its independence of the batch."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsserve.protocol.engine import SamplingParams
from dsserve.worker.base import AdmittedRequest
from dsserve.worker.sampler import Sampler
from dsserve_kernels.reference.sampling import counter_hash, uniform
from dsserve_kernels.select import select_operators

VOCAB, EOS = 50, 1
MASK = 2**64 - 1


def new_sampler(random_seed: int | None = 0) -> Sampler:
    return Sampler(
        select_operators("cpu", "released"),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        random_seed=random_seed,
    )


def admitted(
    request_id: int,
    *,
    prompt: tuple[int, ...] = (0, 3, 4),
    min_new_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    **sampling: Any,
) -> AdmittedRequest:
    return AdmittedRequest(
        request_id,
        SamplingParams(**sampling),
        np.array(prompt, dtype=np.uint32),
        stop_token_ids,
        min_new_tokens,
        ignore_eos,
    )


class Drawn:
    """A sampler with requests 0.., that draws for some of them."""

    def __init__(self, *requests: AdmittedRequest) -> None:
        self.sampler = new_sampler()
        self.sampler.admit(requests)

    def __call__(
        self, logits: torch.Tensor, requests: list[int], positions: list[int]
    ) -> tuple[list[int], list[bool]]:
        rows = self.sampler.rows_of(np.array(requests, dtype=np.uint64))
        ids, broken = self.sampler.draw(logits.clone(), rows, np.array(positions, dtype=np.int64))
        return ids.tolist(), broken.tolist()


def draws(logits: torch.Tensor, count: int, seed: int = 1, **sampling: Any) -> list[int]:
    """Draws of one distribution at positions 0.. count - 1."""
    draw = Drawn(admitted(0, seed=seed, **sampling))
    ids, _ = draw(logits.expand(count, -1), [0] * count, list(range(count)))
    return ids


def naive_distribution(
    logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """Probabilities after temperature, top-k, top-p and min-p, one id at a time."""
    weights = [math.exp(value / temperature) for value in logits.tolist()]
    total = sum(weights)
    probabilities = [weight / total for weight in weights]
    order = sorted(range(VOCAB), key=lambda i: (-probabilities[i], i))
    kept, mass = set(), 0.0
    for rank, index in enumerate(order):
        if rank and (mass >= top_p or (0 < top_k <= rank)):
            break
        if rank and probabilities[index] < min_p * probabilities[order[0]]:
            break
        kept.add(index)
        mass += probabilities[index]
    rest = sum(probabilities[i] for i in kept)
    return [probabilities[i] / rest if i in kept else 0.0 for i in range(VOCAB)]


def random_logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


settings_of = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.2, 2.0),
        "top_k": st.sampled_from([-1, 1, 2, 5, 20, VOCAB, 1000]),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.9),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), settings_of)
def test_only_ids_of_the_naive_set_are_drawn_and_all_likely_ones_are(
    seed: int, sampling: dict[str, Any]
) -> None:
    logits = random_logits(seed)
    allowed = naive_distribution(logits, **sampling)
    ids = draws(logits, 400, seed=seed, **sampling)
    assert all(allowed[i] > 0 for i in ids)
    assert {i for i in range(VOCAB) if allowed[i] > 0.1} <= set(ids)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 1.5, "top_k": -1, "top_p": 1.0, "min_p": 0.1},
    ],
)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_distribution(sampling: dict[str, Any], by: str) -> None:
    """Chi-square over positions of one request, and over the seeds of many."""
    count = 20_000
    logits = random_logits(5, scale=1.0)
    expected = np.array(naive_distribution(logits, **sampling)) * count
    if by == "position":
        ids = draws(logits, count, **sampling)
    else:
        requests = [admitted(i, seed=i, **sampling) for i in range(count)]
        ids, _ = Drawn(*requests)(logits.expand(count, -1), list(range(count)), [7] * count)
    observed = np.bincount(ids, minlength=VOCAB)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    freedom = int(kept.sum()) - 1
    statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    # Mean n, variance 2n: five standard deviations.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_temperature_zero_takes_the_largest_and_of_equals_the_first() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 30] = logits[1, 20] = 2.0
    logits[2, VOCAB - 1] = 1e-30
    ids, _ = Drawn(admitted(0, temperature=0.0))(logits, [0] * 3, [0, 1, 2])
    assert ids == [0, 20, VOCAB - 1]


def test_a_top_k_beyond_the_vocabulary_takes_all_of_it() -> None:
    logits = random_logits(1).expand(1, -1)
    largest = Drawn(admitted(0, seed=3, top_k=2**70))(logits, [0], [5])
    assert largest[0] == Drawn(admitted(0, seed=3))(logits, [0], [5])[0]


def test_greedy_rows_beside_drawn_ones_stay_greedy() -> None:
    draw = Drawn(admitted(0, temperature=0.0), admitted(1, seed=3), admitted(2, seed=3, top_k=1))
    for seed in range(50):
        logits = random_logits(seed).expand(3, -1)
        ids, _ = draw(logits, [0, 1, 2], [seed] * 3)
        assert ids[0] == ids[2] == int(logits[0].argmax())


def test_a_draw_depends_on_seed_and_position_but_not_on_the_batch() -> None:
    requests = [
        admitted(i, seed=100 + i, temperature=0.5 + i / 10, top_p=0.95, top_k=30, min_p=0.01)
        for i in range(8)
    ]
    logits = torch.stack([random_logits(i) for i in range(8)])
    alone = [Drawn(requests[i])(logits[i : i + 1], [i], [20 + i])[0][0] for i in range(8)]
    rng = random.Random(0)
    for _ in range(10):
        mates = rng.sample(range(8), rng.randint(1, 8))
        ids, _ = Drawn(*requests)(logits[mates], mates, [20 + i for i in mates])
        assert ids == [alone[i] for i in mates]


def test_other_seeds_and_positions_give_other_draws() -> None:
    flat = torch.zeros(VOCAB)
    by_position = draws(flat, 200, seed=1)
    assert len(set(by_position)) > 30
    assert draws(flat, 200, seed=1) == by_position
    assert draws(flat, 200, seed=2) != by_position


def test_requests_without_a_seed_get_one_of_their_own() -> None:
    flat = torch.zeros(20, VOCAB)
    requests = [admitted(i) for i in range(20)]
    ids, _ = Drawn(*requests)(flat, list(range(20)), [5] * 20)
    assert len(set(ids)) > 8
    assert Drawn(*requests)(flat, list(range(20)), [5] * 20)[0] == ids


def naive_hash(seed: int, position: int, index: int) -> int:
    """splitmix64 finalisers over the three counters."""
    x = (seed * 0x9E3779B97F4A7C15 + position) & MASK
    for salt in (0, index):
        x = ((x + salt) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return x


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), st.integers(0, 130_000))
def test_noise_is_a_hash_of_three_counters(seed: int, position: int, index: int) -> None:
    arguments = [torch.tensor([value]) for value in (seed, position, index)]
    assert int(counter_hash(*arguments)[0]) & MASK == naive_hash(seed, position, index)
    assert 0.0 < float(uniform(*arguments)[0]) < 1.0


def penalised(logits: list[float], prompt: list[int], output: list[int], **p: float) -> list[float]:
    result = []
    for index, value in enumerate(logits):
        if index in prompt or index in output:
            value = value / p["repetition"] if value > 0 else value * p["repetition"]
        count = output.count(index)
        result.append(value - p["presence"] * (count > 0) - p["frequency"] * count)
    return result


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.5, 2.0),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
)
def test_penalties_count_prompt_and_output(
    seed: int, repetition: float, presence: float, frequency: float
) -> None:
    """Greedy ids step by step equal those of logits that are penalised one id at a time."""
    prompt = (0, 3, 4, 4)
    draw = Drawn(
        admitted(
            0,
            prompt=prompt,
            temperature=0.0,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        ),
        admitted(1, temperature=0.0),
    )
    output: list[int] = []
    for step in range(12):
        logits = random_logits(seed + step % 3, scale=1.0)
        wanted = penalised(
            logits.tolist(),
            list(prompt),
            output,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )
        ids, _ = draw(torch.stack((logits, logits)), [0, 1], [len(prompt) + step] * 2)
        assert wanted[ids[0]] >= max(wanted) - 1e-5
        assert ids[1] == int(logits.argmax())
        output.append(ids[0])


def test_bias_is_added_and_can_ban_or_force() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    draw = Drawn(
        admitted(0, temperature=0.0, logit_bias={best: -100.0, 7: 1.0}),
        admitted(1, seed=1, logit_bias={9: 100.0}),
        admitted(2, temperature=0.0),
    )
    ids, _ = draw(logits.expand(3, -1), [0, 1, 2], [3, 3, 3])
    changed = logits.clone()
    changed[best] = -torch.inf
    changed[7] += 1.0
    assert ids == [int(changed.argmax()), 9, best]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_are_banned_until_min_new_tokens(temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 40] = 50.0, 40.0
    prompt = (0, 3, 4)
    request = admitted(
        0, prompt=prompt, temperature=temperature, seed=1, min_new_tokens=3, stop_token_ids=(40,)
    )
    draw = Drawn(request)
    ids = [draw(logits, [0], [len(prompt) + step])[0][0] for step in range(5)]
    assert not set(ids[:3]) & {EOS, 40}
    assert ids[3:] == [EOS, EOS]


def test_with_ignore_eos_only_stop_tokens_are_banned() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 40] = 50.0, 60.0
    draw = Drawn(
        admitted(0, temperature=0.0, min_new_tokens=2, stop_token_ids=(40,), ignore_eos=True)
    )
    assert draw(logits, [0], [3])[0] == [EOS]
    assert draw(logits, [0], [5])[0] == [40]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_broken_row_is_told_and_hurts_no_other(poison: float) -> None:
    requests = [admitted(0, seed=4), admitted(1, seed=5, presence_penalty=0.5), admitted(2, seed=6)]
    logits = torch.stack([random_logits(i) for i in range(3)])
    expected, _ = Drawn(*requests)(logits, [0, 1, 2], [9] * 3)
    broken_logits = logits.clone()
    broken_logits[1, 17] = poison
    ids, broken = Drawn(*requests)(broken_logits, [0, 1, 2], [9] * 3)
    assert broken == [False, True, False]
    assert [ids[0], ids[2]] == [expected[0], expected[2]]


def test_released_requests_are_forgotten_and_their_taken_rows_stay_valid() -> None:
    draw = Drawn(admitted(0, temperature=0.0), admitted(1, temperature=0.0))
    rows = draw.sampler.rows_of(np.array([0, 1], dtype=np.uint64))
    draw.sampler.release([0, 5])
    ids, _ = draw.sampler.draw(torch.eye(2, VOCAB), rows, np.array([3, 3]))
    assert ids.tolist() == [0, 1]
    with pytest.raises(KeyError):
        draw.sampler.rows_of(np.array([0], dtype=np.uint64))
