"""The draft model's window rows as the target's forward writes them: the same however the tokens were run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from dsserve.config.model import load_model_config
from dsserve.models.deepseek_v4.draft_context import history_rows
from dsserve.worker.runner import load_model
from golden_runs import model as target_alone
from golden_runs import prompt_ids
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from dsserve.models.deepseek_v4.draft import Proposal
    from dsserve.models.deepseek_v4.model import DeepseekV41Model

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
WINDOW, GAMMA, NUM_STAGES = 16, 5, 3
IDS = prompt_ids(CHECKPOINT, "len70")


@pytest.fixture(scope="module")
def model() -> DeepseekV41Model:
    return load_model(
        CHECKPOINT,
        load_model_config(CHECKPOINT),
        numerics="released",
        context_length=512,
        device=torch.device("cpu"),
        draft=True,
    )


def history(pool: Pool, request: Request, newest: int, floor: int = 0) -> Tensor:
    return history_rows(
        torch.tensor([request.slot]),
        torch.tensor([newest]),
        torch.tensor([floor]),
        window=WINDOW,
        ring_rows=pool.runner.pools.layout.window_ring_rows,
    )


def rows(pool: Pool, request: Request, newest: int, floor: int = 0) -> list[Tensor]:
    """What a block behind `newest` sees, of each stage."""
    index = history(pool, request, newest, floor)[0]
    return [ring[index[index >= 0]] for ring in pool.runner.pools.draft_window.values()]


def propose(pool: Pool, request: Request, anchor: int, position: int) -> Proposal:
    draft = pool.runner.model.draft
    assert draft is not None
    return draft.propose(
        torch.tensor([anchor]),
        torch.tensor([position]),
        history(pool, request, position - 1),
        gamma=GAMMA,
        pools=pool.runner.pools,
    )


def whole(model: DeepseekV41Model, ids: list[int]) -> tuple[Pool, Request]:
    pool = Pool(model, num_requests=1, stale=True)
    request = Request(pool, ids)
    merged_forward(pool, [request.prefill(len(ids))])
    return pool, request


def same(ours: list[Tensor], expected: list[Tensor]) -> bool:
    assert len(ours) == len(expected) == NUM_STAGES
    return all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("piece", [1, 17])
def test_pieces_of_a_prompt_leave_the_rows_of_the_whole(
    model: DeepseekV41Model, piece: int
) -> None:
    ids = IDS[:26]
    expected = rows(*whole(model, ids), newest=25)
    assert expected[0].shape[0] == WINDOW
    pool = Pool(model, num_requests=2, stale=True)
    mate, request = Request(pool, IDS[30:]), Request(pool, ids)
    while request.num_left:
        plans = [request.prefill(piece)]
        if mate.num_left:
            plans.insert(0, mate.prefill(7))
        merged_forward(pool, plans)
    assert same(rows(pool, request, 25), expected)


def test_rejected_rows_leave_no_trace(model: DeepseekV41Model) -> None:
    """Verify steps whose later rows were wrong: the next step starts behind the last accepted token."""
    ids = IDS[:41]
    plain_pool, plain = whole(model, ids)
    pool = Pool(model, num_requests=1, stale=True)
    request = Request(pool, ids[:20])
    merged_forward(pool, [request.prefill(20)])
    position = 20
    for num_accepted in (0, 2, 5, 1, 0, 4, 2):
        right = ids[position : position + 1 + num_accepted]
        wrong = [300 + num_accepted] * (GAMMA - num_accepted)
        plan = request.planner.step([*right, *wrong], position, (), tail_len=len(right + wrong))
        merged_forward(pool, [plan])
        position += len(right)
    assert position == 41
    assert same(rows(pool, request, 40), rows(plain_pool, plain, 40))
    ours, expected = (
        propose(p, r, anchor=IDS[41], position=41)
        for p, r in ((pool, request), (plain_pool, plain))
    )
    assert torch.equal(ours.logits, expected.logits)
    assert torch.equal(ours.confidence_raw, expected.confidence_raw)


def test_decoder_replay_gives_the_rows_of_its_tail(model: DeepseekV41Model) -> None:
    """A prompt within the window: those of the whole prompt. A longer one: a whole window, from the floor on."""
    short_pool = Pool(model, num_requests=1, stale=True)
    short = Request(short_pool, IDS[:WINDOW], is_replay=True)
    merged_forward(short_pool, [short.prefill(WINDOW)])
    expected = rows(*whole(model, IDS[:WINDOW]), newest=WINDOW - 1)
    assert same(rows(short_pool, short, WINDOW - 1), expected)
    pool = Pool(model, num_requests=1)
    request = Request(pool, IDS[:40], is_replay=True)
    merged_forward(pool, [request.prefill(40)])
    stored = rows(pool, request, 39, floor=request.planner.floors.tail)
    assert all(part.shape[0] == WINDOW for part in stored)
    assert all(bool((part != 0).any(1).all()) for part in stored)
    assert all(int((ring != 0).any(1).sum()) == WINDOW for ring in pool.runner.pools.draft_window.values())  # fmt: skip


def test_open_chunks_give_no_rows(model: DeepseekV41Model) -> None:
    pool = Pool(model, num_requests=1)
    request = Request(pool, IDS, is_replay=True)
    merged_forward(pool, [request.prefill(20)])
    assert not any(bool(ring.any()) for ring in pool.runner.pools.draft_window.values())


def test_the_head_changes_nothing_about_the_target(model: DeepseekV41Model) -> None:
    logits = []
    for one in (model, target_alone(CHECKPOINT, "released")):
        pool = Pool(one, num_requests=1)
        request = Request(pool, IDS[:30])
        logits.append(torch.cat(merged_forward(pool, [request.prefill(30)])))
    assert torch.equal(*logits)
