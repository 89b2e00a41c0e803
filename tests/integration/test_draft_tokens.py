"""What is output does not depend on drafts: the real model with and without them, however requests are scheduled.

Checkpoint A (window 16, pages of 16) with an oracle that makes every accepted length occur, and the embedded model with
its own trained head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from draft_runs import GREEDY, Ask, Server, compare, small_model
from dsserve.protocol.engine import FinishCode, SamplingParams
from dsserve.worker.speculator import SpeculationSettings
from engine_process import EOS, MODEL_PATH
from golden_runs import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

GAMMA = 5
STATIC = SpeculationSettings(gamma=GAMMA)
SMALL = {"page_size": 16, "num_pages": 256, "context_length": 256, "chunked_prefill_size": 64}
#: The end token would end most outputs of random weights at once, or never.
ENDLESS = SamplingParams(temperature=0.0, logit_bias={EOS: -1e4})


def some_prompts(count: int, *, step: int = 7) -> list[list[int]]:
    """Prompts of many lengths, odd ones and a single token among them, that share no page."""
    whole = prompt_ids(MODEL_PATH, "len100") + prompt_ids(MODEL_PATH, "len90")
    lengths = [1, 2, 15, 16, 17, 33, 64, 31, 48, 5, 99, 80]
    return [
        [400 - i, *whole[step * i : step * i + lengths[i % len(lengths)] - 1]] for i in range(count)
    ]


def asks_of(prompts: Sequence[Sequence[int]], **fields: Any) -> list[Ask]:
    return [
        Ask(
            prompt, **{"max_new_tokens": 9 + i % 7, "sampling": ENDLESS, "arrives": i // 3} | fields
        )
        for i, prompt in enumerate(prompts)
    ]


def assert_varied(server: Server) -> None:
    """The test means something: runs of every length were accepted."""
    assert set(server.accept_lens()) == set(range(1, GAMMA + 2))


@pytest.mark.parametrize(
    "is_overlapped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["overlap", "plain"]
)
def test_greedy_tokens_of_a_batch_do_not_depend_on_drafts(is_overlapped: bool) -> None:
    """The second batch finds prefixes of the first: hits beyond a window and within it."""
    first = some_prompts(7)
    hits = [[*prompt, 7 + i] for i, prompt in enumerate(first) if len(prompt) > 30]
    server = compare(
        small_model,
        [asks_of(first), asks_of(hits)],
        STATIC,
        has_oracle=True,
        is_overlapped=is_overlapped,
        **SMALL,
    )
    assert_varied(server)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"mixed_chunk": True, "chunked_prefill_size": 48}, marks=pytest.mark.slow),
        {"decoder_replay": False, "encoder_replay": False, "mixed_chunk": True},
    ],
    ids=["mixed", "mixed-no-replay"],
)
def test_mixed_steps_change_no_token(sizes: dict[str, Any]) -> None:
    """Decode rows that ride along with prompts have no drafts, and positions that only the device knows."""
    asks = asks_of(some_prompts(7), max_new_tokens=14)
    server = compare(small_model, [asks], STATIC, has_oracle=True, **SMALL | sizes)
    assert_varied(server)


@pytest.mark.slow
def test_retraction_changes_no_token() -> None:
    """Without replay, which makes the tokens after a resumption an approximation."""
    prompts = [prompt[:20] for prompt in some_prompts(6)]
    sizes = SMALL | {
        "page_size": 2,
        "num_pages": 66,
        "conservativeness": 0.01,
        "decoder_replay": False,
        "encoder_replay": False,
    }
    asks = asks_of(prompts, max_new_tokens=24, arrives=0)
    server = compare(small_model, [asks], STATIC, has_oracle=True, **sizes)
    assert server.scheduler.stats()["retracted_total"] > 0


def test_ends_inside_a_run_change_no_token() -> None:
    """Stop tokens, stop strings and length limits at every place of a block; one and two tokens in all."""
    prompts = some_prompts(9)
    plain = Server(small_model, settings=None, **SMALL)
    outputs = plain.run(asks_of(prompts, max_new_tokens=14))
    plain.close()
    asks = [
        Ask(
            prompt,
            max_new_tokens=14 if i % 3 else 1 + i // 3,
            sampling=ENDLESS,
            stop_token_ids=(answer.ids[2 + i],) if i % 3 == 1 else (),
            kept=1 + i if i % 3 == 2 else None,
        )
        for i, (prompt, answer) in enumerate(zip(prompts, outputs, strict=True))
    ]
    # A stop string is found some steps late; what is kept is the same.
    server = compare(small_model, [asks], STATIC, has_oracle=True, **SMALL)
    assert server.scheduler.stats()["num_running"] == 0


def test_what_changes_logits_is_applied_row_by_row() -> None:
    """Penalties over the drafts before a row, bias, end tokens banned for a while, draws with a seed."""
    prompts = some_prompts(8)
    samplings = [
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4),
        SamplingParams(temperature=0.0, frequency_penalty=1.5, logit_bias={EOS: -1e4, 7: 2.0}),
        SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.8, logit_bias={EOS: -1e4}),
        SamplingParams(temperature=1.0, seed=6, top_k=20, top_p=0.9, logit_bias={EOS: 30.0}),
        SamplingParams(temperature=0.8, seed=7, min_p=0.05, logit_bias={EOS: -1e4}),
    ]
    asks = [
        Ask(
            prompt,
            max_new_tokens=14,
            sampling=samplings[i % len(samplings)],
            min_new_tokens=6 if i % len(samplings) == 3 else 0,
        )
        for i, prompt in enumerate(prompts)
    ]
    server = compare(small_model, [asks], STATIC, has_oracle=True, **SMALL)
    assert max(server.accept_lens()) > 3


@pytest.mark.parametrize("verify", [pytest.param("cap", marks=pytest.mark.slow), "compact"])
def test_a_schedule_of_verification_changes_no_token(verify: str) -> None:
    settings = SpeculationSettings(gamma=GAMMA, verify=verify)
    asks = asks_of(some_prompts(6), arrives=0)
    server = compare(small_model, [asks], settings, has_oracle=True, **SMALL)
    assert max(server.accept_lens()) > 3


@pytest.mark.parametrize("gamma", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_shorter_blocks_and_requests_that_want_fewer_drafts(gamma: int) -> None:
    asks = [
        Ask(prompt, max_new_tokens=12, sampling=ENDLESS, draft_len=(None, 0, 1)[i % 3])
        for i, prompt in enumerate(some_prompts(6))
    ]
    server = compare(
        small_model, [asks], SpeculationSettings(gamma=gamma), has_oracle=True, **SMALL
    )
    assert max(server.accept_lens()) == gamma + 1


def test_a_seed_gives_the_same_alone_and_among_others() -> None:
    prompts = some_prompts(4)
    seeded = Ask(
        prompts[3], max_new_tokens=16, sampling=SamplingParams(seed=3, logit_bias={EOS: -1e4})
    )
    others = asks_of(prompts[:3], sampling=SamplingParams(logit_bias={EOS: -1e4}))
    server = Server(small_model, settings=STATIC, radix_cache=False, **SMALL)
    try:
        [alone] = server.run([seeded])
        together = server.run([*others, seeded])
        assert together[-1].ids == alone.ids
        assert len(set(alone.ids)) > 3
    finally:
        server.close()


@pytest.mark.parametrize("length", [2.5, pytest.param(6.0, marks=pytest.mark.slow)])
def test_a_simulated_accept_length_is_met_on_average(length: float) -> None:
    asks = asks_of(some_prompts(4), max_new_tokens=60, simulated_len=length)
    server = Server(small_model, settings=STATIC, **SMALL)
    try:
        answers = server.run(asks)
    finally:
        server.close()
    assert {answer.code for answer in answers} == {FinishCode.LENGTH}
    # Near the output limit there are fewer drafts than the length wants.
    full = [
        int(accepted) + 1
        for result in server.results
        if result.drafts is not None
        for accepted, verified in zip(result.drafts.accepted, result.drafts.verified, strict=True)
        if verified == GAMMA
    ]
    assert abs(float(np.mean(full)) - length) < 0.4
    assert set(full) <= {int(np.floor(length)), int(np.ceil(length))}


@pytest.mark.parametrize(
    "settings",
    [
        SpeculationSettings(gamma=GAMMA, sampling="rejection"),
        pytest.param(
            SpeculationSettings(gamma=GAMMA, sampling="rejection", is_block=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SpeculationSettings(gamma=GAMMA, sampling="greedy-draft"), marks=pytest.mark.slow
        ),
    ],
    ids=["rejection", "block", "greedy-draft"],
)
def test_greedy_requests_are_exact_however_others_are_sampled(
    settings: SpeculationSettings,
) -> None:
    prompts = some_prompts(5)
    asks = asks_of(prompts, sampling=GREEDY, max_new_tokens=10)
    server = compare(small_model, [asks], settings, **SMALL)
    assert server.accept_lens()
    sampled = Server(small_model, settings=settings, **SMALL)
    try:
        mixed = [*asks[:3], *asks_of(prompts[3:], sampling=SamplingParams(seed=4))]
        expected = Server(small_model, settings=None, **SMALL)
        greedy = expected.run(asks[:3])
        expected.close()
        assert sampled.run(mixed)[:3] == greedy
    finally:
        sampled.close()
