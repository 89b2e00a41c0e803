"""The same greedy tokens from the real model however a request is scheduled (serving.md S5).

Checkpoint A through the real engine process: overlap on and off, alone or with 16 mates, in chunks, retracted, behind
hits. Retraction is tested with replay switched off: a retracted request comes back through a replay over its own
output, which is an approximation by design (replay.md section 6), so its later tokens may differ.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsserve.protocol.engine import FinishCode, SamplingParams
from engine_process import EOS, MODEL_PATH, Engine, assert_idle, running_engine
from golden_runs import golden, prompt_ids

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, logit_bias={EOS: -1e4})
NO_REPLAY = {
    "enable_encoder_swa_bounded_replay": False,
    "enable_decoder_swa_bounded_replay": False,
}
#: Window of checkpoint A, and the page size of the servers.
WINDOW = PAGE = 16


def real_engine(**flags: Any):
    """Without drafts: a head of random weights would only cost time; `test_draft_tokens.py` has them."""
    plain = {"speculative_algorithm": "none"}
    return running_engine(load_format="auto", json_model_override_args={}, **plain | flags)


def some_prompts(count: int) -> list[list[int]]:
    """Prompts of many lengths that share no page."""
    whole = prompt_ids(MODEL_PATH, "len100") + prompt_ids(MODEL_PATH, "len90")
    return [[0, 400 - i, *whole[7 * i : 7 * i + 3 + 5 * i % 60]] for i in range(count)]


async def continue_greedily(
    engine: Engine, prompt: list[int], num_tokens: int = NUM_TOKENS
) -> list[int]:
    """All `num_tokens` tokens: the end token is banned instead of ignored.

    A request that ignores it has its whole output reserved when it is admitted, and is never retracted.
    """
    ids, code = await engine.generate(prompt, num_tokens, sampling=GREEDY)
    assert code is FinishCode.LENGTH
    return ids


async def one_by_one(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [await continue_greedily(engine, prompt) for prompt in prompts]


async def all_at_once(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return await asyncio.gather(*(continue_greedily(engine, prompt) for prompt in prompts))


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Tokens of each prompt alone, without overlap, replay or hits: what all other ways must give."""

    async def run() -> list[list[int]]:
        async with real_engine(disable_overlap_schedule=True, **NO_REPLAY) as engine:
            return await one_by_one(engine, some_prompts(17))

    return asyncio.run(run())


@pytest.mark.parametrize("disable_overlap", [False, True], ids=["overlap", "plain"])
async def test_sixteen_mates_change_no_token(alone: list[list[int]], disable_overlap: bool) -> None:
    async with real_engine(disable_overlap_schedule=disable_overlap, **NO_REPLAY) as engine:
        assert await all_at_once(engine, some_prompts(17)) == alone
        assert_idle(await engine.idle_state())


@pytest.mark.parametrize(
    "flags",
    [{"chunked_prefill_size": 32}, {"chunked_prefill_size": 64, "enable_mixed_chunk": True}],
    ids=["chunks", "mixed"],
)
async def test_chunks_change_no_token(alone: list[list[int]], flags: dict[str, Any]) -> None:
    async with real_engine(**flags, **NO_REPLAY) as engine:
        assert await all_at_once(engine, some_prompts(17)) == alone


async def test_overlap_changes_no_token_of_a_single_request(alone: list[list[int]]) -> None:
    async with real_engine(**NO_REPLAY) as engine:
        assert await one_by_one(engine, some_prompts(3)) == alone[:3]


async def test_retraction_changes_no_token() -> None:
    """Six requests that grow to twice the pool: some are retracted and computed again."""
    prompts, num_tokens = some_prompts(6), 24
    async with real_engine(
        page_size=2, max_total_tokens=112, schedule_conservativeness=0.01, **NO_REPLAY
    ) as engine:
        together = await asyncio.gather(
            *(continue_greedily(engine, prompt, num_tokens) for prompt in prompts)
        )
        state = await engine.idle_state()
        assert state["stats"]["retracted_total"] > 0, state["stats"]
        assert_idle(state)
        alone = [await continue_greedily(engine, prompt, num_tokens) for prompt in prompts]
        assert together == alone


async def test_up_to_a_window_replay_changes_no_token(alone: list[list[int]]) -> None:
    """Decoder replay of a prompt within the window is the full prefill (replay.md section 5)."""
    prompts = some_prompts(17)
    short = [i for i, prompt in enumerate(prompts) if len(prompt) <= WINDOW]
    assert len(short) >= 3
    async with real_engine() as engine:
        tokens = await all_at_once(engine, [prompts[i] for i in short])
        assert tokens == [alone[i] for i in short]


@pytest.fixture(scope="module")
def replayed() -> list[list[int]]:
    """Tokens of cold prompts alone under bounded replay, without overlap."""

    async def run() -> list[list[int]]:
        async with real_engine(disable_overlap_schedule=True, disable_radix_cache=True) as engine:
            return await one_by_one(engine, some_prompts(17))

    return asyncio.run(run())


async def test_cold_prompts_under_replay_depend_on_nothing_else(
    replayed: list[list[int]],
) -> None:
    """With mates, overlap and chunks; a chunk holds a window and a page at least."""
    async with real_engine(chunked_prefill_size=2 * WINDOW) as engine:
        assert await all_at_once(engine, some_prompts(17)) == replayed


async def test_the_same_hit_gives_the_same_tokens_alone_and_among_mates() -> None:
    """Golden tokens of a hit, whoever else runs, whether it is the first or the second of its kind."""
    prompt = prompt_ids(MODEL_PATH, "len100")
    expected = golden(MODEL_PATH, "released")["len100.replay.prefix48.tokens"].tolist()
    others = some_prompts(16)
    async with real_engine() as engine:
        await continue_greedily(engine, prompt[:48], 1)
        hit = asyncio.create_task(continue_greedily(engine, prompt, len(expected)))
        await asyncio.gather(*(continue_greedily(engine, other) for other in others))
        assert await hit == expected
        again = engine.submit(prompt[:48] + prompt[48:63], 1, sampling=GREEDY)
        deltas = [delta async for delta in again]
        assert deltas[-1].cached_len == 48


async def test_a_hit_within_the_window_is_not_taken(replayed: list[list[int]]) -> None:
    """The scheduler takes no hit up to a window, so such a request is a cold one."""
    prompt = next(prompt for prompt in some_prompts(17) if len(prompt) > 2 * WINDOW)
    expected = replayed[some_prompts(17).index(prompt)]
    async with real_engine() as engine:
        await continue_greedily(engine, prompt[:WINDOW], 1)
        assert await continue_greedily(engine, prompt) == expected
