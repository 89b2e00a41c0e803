"""The embedded model answers the same with its draft head and without it, greedily and with seeds."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tools.tiny_model.data.mix import EVALUATION
from tools.tiny_model.render import Renderer
from tools.tiny_model.served.cases import build_cases

from draft_runs import Ask, Server, checkpoint_model, compare
from dsserve.chat.recipe import ChatConverter
from dsserve.chat.settings import ChatSettings
from dsserve.models.deepseek_v4.draft_context import history_rows
from dsserve.protocol.engine import SamplingParams
from dsserve.worker.accept import Round
from dsserve.worker.sampler import RunRows, SamplingTable
from dsserve.worker.speculator import SpeculationSettings
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsserve.worker.sampler import SamplingRow

TOKENIZER = Path(__file__).resolve().parents[2] / "tools" / "tiny_model" / "tokenizer.json"
GAMMA = 5
SHORT = [name for name in EVALUATION if "1K" not in name and "2K" not in name]


@cache
def renderer() -> Renderer:
    return Renderer(TOKENIZER)


@cache
def converter() -> ChatConverter:
    return ChatConverter(
        ChatSettings(
            served_names=("m",),
            tokenizer_path=TOKENIZER,
            context_length=4096,
            model_version="v4.1",
        )
    )


def questions(count: int) -> list[list[int]]:
    """Prompts of held-out questions of many kinds, and one of a single token."""
    prompts: list[list[int]] = [[0]]
    for name in itertools.cycle(SHORT):
        if len(prompts) >= count:
            return prompts[:count]
        take = -(-count // len(SHORT))
        for case in build_cases(renderer(), name, take):
            body = case.body()
            if case.example.response is None:
                prompts.append(converter().prompt_ids(body))
    raise AssertionError


def batches_of(prompts: list[list[int]], rng: Random, **fields: Any) -> Iterator[list[Ask]]:
    """Batches of 1 to 16; in each some arrive later, end at a limit, or at a stop string."""
    left = list(prompts)
    while left:
        size = rng.randint(1, 16)
        batch, left = left[:size], left[size:]
        yield [
            Ask(
                prompt,
                **{
                    "max_new_tokens": rng.choice([3, 17, 40]),
                    "arrives": rng.randrange(6),
                    "kept": rng.randint(1, 12) if rng.random() < 0.2 else None,
                }
                | fields,
            )
            for prompt in batch
        ]


def assert_drafts_help(server: Server) -> None:
    """A head that proposes nothing right would pass every comparison."""
    assert float(np.mean(server.accept_lens())) > 2.0


def test_greedy_answers_do_not_depend_on_drafts(embedded_checkpoint: Path) -> None:
    """Long prompts follow shorter ones with the same start: hits beyond the window, in chunks."""
    rng = Random(1)
    prompts = questions(6)
    again = [[*prompt, 5, 6] for prompt in sorted(prompts, key=len)[-1:]]
    batches = [
        *batches_of(prompts, rng, max_new_tokens=20),
        *batches_of(again, rng, max_new_tokens=9),
    ]
    server = compare(
        partial(checkpoint_model, embedded_checkpoint),
        batches,
        SpeculationSettings(gamma=GAMMA),
        page_size=16,
        num_pages=512,
        chunked_prefill_size=144,
    )
    assert_drafts_help(server)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize(
    ("page_size", "chunk", "verify"),
    [(16, 144, "static"), (128, 256, "static"), (16, 144, "compact"), (128, 256, "cap")],
    ids=["page16", "page128", "compact", "cap"],
)
def test_five_hundred_greedy_answers_do_not_depend_on_drafts(
    embedded_checkpoint: Path, page_size: int, chunk: int, verify: str, part: int
) -> None:
    """A hundred in each part."""
    rng = Random(page_size + part)
    prompts = questions(500)[part::5]
    again = [[*prompt, *prompt[:9]] for prompt in rng.sample(prompts, len(prompts) // 10)]
    batches = [*batches_of(prompts, rng), *batches_of(again, rng)]
    server = compare(
        partial(checkpoint_model, embedded_checkpoint),
        batches,
        SpeculationSettings(gamma=GAMMA, verify=verify),
        page_size=page_size,
        num_pages=8192 // page_size,
        chunked_prefill_size=chunk,
    )
    assert_drafts_help(server)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_shorter_blocks_change_no_answer(embedded_checkpoint: Path, gamma: int) -> None:
    server = compare(
        partial(checkpoint_model, embedded_checkpoint),
        list(batches_of(questions(40), Random(gamma))),
        SpeculationSettings(gamma=gamma),
    )
    assert max(server.accept_lens()) == gamma + 1


@pytest.mark.slow
def test_a_seed_gives_the_same_answer_with_and_without_drafts(embedded_checkpoint: Path) -> None:
    prompts = questions(60)
    batches = [
        [
            Ask(
                ask.prompt,
                max_new_tokens=24,
                sampling=SamplingParams(seed=index, temperature=0.9, top_p=0.95),
            )
            for index, ask in enumerate(batch)
        ]
        for batch in batches_of(prompts, Random(3))
    ]
    server = compare(
        partial(checkpoint_model, embedded_checkpoint), batches, SpeculationSettings(gamma=GAMMA)
    )
    assert float(np.mean(server.accept_lens())) > 1.5


NUM_DRAWS, TOP_K = 100_000, 30


class FirstTokens:
    """Logits of the target and of the draft head behind a prompt, and behind each likely first token."""

    def __init__(self, path: Path) -> None:
        model = checkpoint_model(path, draft=True)
        assert model.draft is not None
        prompt = questions(4)[3][-12:]
        pool = Pool(model, num_requests=TOP_K + 1, length=32)
        request = Request(pool, prompt)
        self.first = merged_forward(pool, [request.prefill(len(prompt))])[0][-1]
        self.position = len(prompt)
        self.firsts = self.first.topk(TOP_K).indices.sort().values
        behind = [Request(pool, [*prompt, token]) for token in self.firsts.tolist()]
        plans = [each.prefill(len(prompt) + 1) for each in behind]
        self.second = torch.stack([rows[-1] for rows in merged_forward(pool, plans)])
        count = torch.full((TOP_K,), request.slot)
        history = history_rows(
            count,
            torch.full((TOP_K,), len(prompt) - 1),
            torch.zeros_like(count),
            window=pool.window,
            ring_rows=pool.runner.pools.layout.window_ring_rows,
        )
        with torch.inference_mode():
            block = model.draft.block(
                self.firsts,
                torch.full((TOP_K,), len(prompt)),
                history,
                gamma=1,
                pools=pool.runner.pools,
            )
            self.draft = model.draft.markov_logits(block, 0, self.firsts)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "settings",
    [
        SpeculationSettings(gamma=1),
        SpeculationSettings(gamma=1, sampling="rejection"),
        SpeculationSettings(gamma=1, sampling="rejection", is_block=True),
        SpeculationSettings(gamma=1, sampling="greedy-draft"),
    ],
    ids=["shared-noise", "rejection", "block", "greedy-draft"],
)
def test_two_sampled_tokens_follow_the_distribution_of_plain_sampling(
    embedded_checkpoint: Path, settings: SpeculationSettings
) -> None:
    """Chi-square of 10^5 draws: the first token from the prompt, the second from a step with a draft."""
    tokens = FirstTokens(embedded_checkpoint)
    server = Server(
        partial(checkpoint_model, embedded_checkpoint),
        settings=settings,
        max_running_requests=TOP_K,
    )
    # Hot: the model is sure of most tokens, and hardly a draft would be rejected.
    sampling = SamplingParams(temperature=2.5, top_k=TOP_K, top_p=0.98)
    observed = torch.zeros(TOP_K, tokens.first.shape[0], dtype=torch.int64)
    accepted = 0
    with torch.inference_mode():
        for start in range(0, NUM_DRAWS, 2000):
            rows = server.sampling_rows(sampling, range(start, start + 2000))
            accepted += draw_two(tokens, server, rows, observed)
    server.close()
    expected = expected_pairs(tokens, server, sampling) * NUM_DRAWS
    assert 0.05 < accepted / NUM_DRAWS < 0.95
    assert_fits(observed, expected)


def draw_two(
    tokens: FirstTokens, server: Server, rows: list[SamplingRow], observed: torch.Tensor
) -> int:
    """Draw both tokens for requests that differ in their seed; returns how many drafts were accepted."""
    table = SamplingTable.of(rows, torch.device("cpu"))
    count = len(rows)
    where = torch.full((count,), tokens.position)
    firsts, _ = server.sampler.draw_rows(
        tokens.first.expand(count, -1), table, RunRows.single(where)
    )
    place = torch.searchsorted(tokens.firsts, firsts)
    speculator = server.speculator
    requests = torch.arange(count)
    # The slot of a request is that of its first token, so that slots hold the drafts' logits.
    slots = place + 1
    draft_logits = tokens.draft[place]
    drafts = speculator.acceptance.choose(table, requests, where)(0, draft_logits)
    if speculator.relay.draft_logits is not None:
        speculator.relay.draft_logits[1 : TOP_K + 1, 0] = tokens.draft
    # What stands behind the draft does not matter to the second token.
    logits = tokens.second[place].repeat_interleave(2, dim=0)
    runs = RunRows(
        requests.repeat_interleave(2),
        (where.unsqueeze(1) + torch.tensor([1, 2])).view(-1),
        torch.arange(2 * count).view(-1, 2),
        drafts.unsqueeze(1),
    )
    at = Round(slots, where, torch.ones_like(where), runs)
    result = speculator.acceptance.accept(logits, table, at)
    observed.index_put_((place, result.ids[:, 0]), torch.ones_like(place), accumulate=True)
    return int(result.count.sum())


def expected_pairs(tokens: FirstTokens, server: Server, sampling: SamplingParams) -> torch.Tensor:
    """Probabilities [first, second] under plain sampling."""

    def distribution(logits: torch.Tensor) -> torch.Tensor:
        count = len(logits)
        values: torch.Tensor = server.runner.model.ops.sampling_distribution(
            logits,
            torch.full((count,), sampling.temperature),
            torch.full((count,), sampling.top_k),
            torch.full((count,), sampling.top_p),
            torch.zeros(count),
        )
        return values

    first = distribution(tokens.first.unsqueeze(0))[0, tokens.firsts]
    return first.unsqueeze(1) * distribution(tokens.second)


def assert_fits(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Cells of fewer than ten expected draws count together; mean n, variance 2n, five standard deviations."""
    assert int(observed[expected == 0].sum()) == 0
    is_large = expected >= 10
    ours = torch.cat((observed[is_large], observed[~is_large].sum().view(1))).double()
    wanted = torch.cat((expected[is_large], expected[~is_large].sum().view(1)))
    kept = wanted > 0
    statistic = float(((ours - wanted)[kept] ** 2 / wanted[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert freedom > 20
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
