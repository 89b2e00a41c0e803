"""What is left on the device after each round of drafts, whatever was rejected (dspark.md section 7, items 5 and 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from draft_runs import GOLDEN_A, Answer, Ask, OracleDraft, Server, small_model
from dsserve.kv.layout import TOKEN_RING
from dsserve.protocol.engine import SamplingParams
from dsserve.worker.speculator import SpeculationSettings
from engine_process import EOS
from golden_runs import prompt_ids
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from collections.abc import Iterator

GAMMA = 5
NO_REPLAY = {"decoder_replay": False, "encoder_replay": False}
SIZES = {"page_size": 16, "num_pages": 64, "context_length": 128, "chunked_prefill_size": 64}
ENDLESS = SamplingParams(temperature=0.0, logit_bias={EOS: -1e4})
PROMPTS = [prompt_ids(GOLDEN_A, "len100")[:length] for length in (1, 22, 37)]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    """Drafts of every quality: what the target says without drafts, spoilt at random places."""
    plain = Server(small_model, settings=None, **SIZES, **NO_REPLAY)
    asks = [Ask(prompt, max_new_tokens=16, sampling=ENDLESS) for prompt in PROMPTS]
    answers = plain.run(asks)
    plain.close()
    server = Server(small_model, settings=SpeculationSettings(gamma=GAMMA), **SIZES, **NO_REPLAY)
    runs = [(ask.prompt, answer.ids) for ask, answer in zip(asks, answers, strict=True)]
    server.speculator.use_draft(OracleDraft(server.runner.model.config, runs))
    yield server
    server.close()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The same one, without slots in use."""
    shared_server.on_step = lambda _answers: None
    shared_server.speculator.relay.committed_len.zero_()
    return shared_server


def run_alone(server: Server, prompt: list[int]) -> None:
    """One request, step by step: it is alone, so its slot is the first."""
    [answer] = server.run([Ask(prompt, max_new_tokens=16, sampling=ENDLESS)], is_overlapped=False)
    assert len(answer.ids) == 16


def slot_and_length(server: Server) -> tuple[int, int]:
    """The slot in use and its committed length."""
    lengths = server.speculator.relay.committed_len
    slot = int(lengths.argmax())
    return slot, int(lengths[slot])


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"len{len(prompt)}")
def test_windows_are_those_of_a_fresh_prefill(server: Server, prompt: list[int]) -> None:
    """Rings of all layers and of the draft stage, over the whole window, after every round."""
    rounds = []

    def check(answers: dict[int, Answer]) -> None:
        [answer] = answers.values()
        slot, committed = slot_and_length(server)
        ids = [*prompt, *answer.ids]
        assert committed == len(ids) - 1
        model = server.runner.model
        pool = Pool(model, num_requests=1, length=128)
        request = Request(pool, ids[:committed])
        merged_forward(pool, [request.prefill(committed)])
        positions = range(max(0, committed - pool.window), committed)
        ring = server.runner.pools.layout.window_ring_rows
        index = [slot * ring + position % ring for position in positions]
        for layer, rows in server.runner.pools.window.items():
            fresh = pool.window_rows(request.slot, layer, positions)
            assert torch.equal(rows[index], fresh), (layer, committed)
        rounds.append(committed)

    server.on_step = check
    run_alone(server, prompt)
    assert 3 < len(rounds) < 16


def test_engram_history_is_the_last_committed_tokens(server: Server) -> None:
    lengths = set()

    def check(answers: dict[int, Answer]) -> None:
        [answer] = answers.values()
        slot, committed = slot_and_length(server)
        ids = [*PROMPTS[1], *answer.ids]
        ring = server.runner.pools.token_ring
        held = [
            int(ring[slot * TOKEN_RING + p % TOKEN_RING])
            for p in range(committed - 3, committed + 1)
        ]
        assert held == ids[-4:]
        lengths.add(committed)

    server.on_step = check
    run_alone(server, PROMPTS[1])
    assert len(lengths) > 3


def test_a_new_request_in_a_slot_finds_nothing_of_the_last_one(server: Server) -> None:
    """All slots were used and hold rejected drafts; the same prompt gives the same answer."""
    asks = [Ask(prompt, max_new_tokens=16, sampling=ENDLESS) for prompt in PROMPTS]
    first = server.run(asks)
    assert server.run(asks[::-1])[::-1] == first
