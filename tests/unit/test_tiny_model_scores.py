"""The embedded model scores with dsserve's CPU path what the trainer scored, held-out example by example."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tools.tiny_model.data.mix import EVALUATION
from tools.tiny_model.evaluate import Evaluator
from tools.tiny_model.scoring import held_out_samples
from tools.tiny_model.verdicts import RowVerdicts, read_verdicts

if TYPE_CHECKING:
    from collections.abc import Iterable

TRAINER = Path(__file__).resolve().parents[2] / "tools" / "tiny_model" / "trainer_verdicts.json"
QUICK_ROWS = ("date", "only-answer", "chinese", "unseen copy")
QUICK_COUNT = 16
#: At most this much between the two scores.
POINT = 0.01
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def evaluator(embedded_checkpoint: Path) -> Evaluator:
    return Evaluator(embedded_checkpoint)


@pytest.fixture(scope="module")
def trainer() -> dict[str, RowVerdicts]:
    return read_verdicts(TRAINER)


def compared(
    evaluator: Evaluator, trainer: dict[str, RowVerdicts], rows: Iterable[str], count: int
) -> dict[str, tuple[list[bool], list[bool]]]:
    """Verdicts of the engine and of the trainer on the same examples."""
    table = {}
    for name in rows:
        # The trainer drew all of them; fewer are the first ones.
        samples = held_out_samples(evaluator.renderer, name, count)
        ours = RowVerdicts()
        for sample in samples:
            answer = sample.ids[sample.prompt_len :].tolist()
            ours.add(sample, right=evaluator.forced(sample) == answer)
        theirs = trainer[name]
        assert ours.examples == theirs.examples[: len(samples)], f"{name}: other examples"
        table[name] = (ours.right, theirs.right[: len(samples)])
    return table


def check(table: dict[str, tuple[list[bool], list[bool]]]) -> None:
    """A row may differ by a point or by one example, all rows together by a point."""
    wrong = {}
    for name, (ours, theirs) in table.items():
        distance = abs(sum(ours) - sum(theirs)) / len(ours)
        if distance > max(POINT, 1 / len(ours)):
            wrong[name] = (sum(ours), sum(theirs), len(ours))
    assert wrong == {}
    totals = [sum(sum(row[side]) for row in table.values()) for side in (0, 1)]
    assert abs(totals[0] - totals[1]) <= POINT * sum(len(row[0]) for row in table.values())


def test_short_rows_score_what_the_trainer_scored(
    evaluator: Evaluator, trainer: dict[str, RowVerdicts]
) -> None:
    check(compared(evaluator, trainer, QUICK_ROWS, QUICK_COUNT))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_row_scores_what_the_trainer_scored(
    evaluator: Evaluator, trainer: dict[str, RowVerdicts]
) -> None:
    assert set(trainer) == set(EVALUATION)
    count = max(len(row.right) for row in trainer.values())
    check(compared(evaluator, trainer, EVALUATION, count))


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"),
    [(64, 63, True), (62, 64, False), (64, 64, True)],
)
def test_one_example_may_differ_and_two_may_not(ours: int, theirs: int, agree: bool) -> None:
    def verdicts(right: int) -> list[bool]:
        return [i < right for i in range(64)]

    table = {"a": (verdicts(ours), verdicts(theirs)), "b": (verdicts(64), verdicts(64))}
    if agree:
        check(table)
    else:
        with pytest.raises(AssertionError):
            check(table)
