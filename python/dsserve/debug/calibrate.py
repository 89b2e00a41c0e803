"""`dsserve calibrate dspark`: lets the model answer prompts with drafts and fits temperatures to what it accepts."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dsserve import _native
from dsserve.config.model import ModelConfig, load_model_config
from dsserve.debug.plans import RequestPlanner, merge_plans
from dsserve.debug.prompts import built_in_prompts, read_prompts
from dsserve.errors import ConfigError, DsserveError
from dsserve.models.deepseek_v4.draft_context import history_rows
from dsserve.speculative.calibrate import (
    Calibration,
    calibration_errors,
    fit_temperatures,
    write_temperatures,
)
from dsserve.worker.placed_runner import PlacedRunner
from dsserve.worker.runner import RunnerSizes, load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dsserve.models.deepseek_v4.draft import DraftModel
    from dsserve.models.deepseek_v4.model import DeepseekV41Model

_PAGE_SIZE = 16
#: Requests that run side by side.
_GROUP = 16
#: One prompt in so many is kept apart, to measure what the temperatures do for others.
_HELD_OUT = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks that a server would have verified.

    Attributes:
        raw: [n, gamma] raw confidences.
        accepted: [n, gamma] whether each draft and all before it were accepted.
    """

    raw: NDArray[np.float64]
    accepted: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """All blocks of several collections."""
        return cls(
            np.concatenate([part.raw for part in parts]),
            np.concatenate([part.accepted for part in parts]),
        )


@dataclass(slots=True)
class _Run:
    """One prompt being answered: its tokens, and the block drafted behind each of them."""

    planner: RequestPlanner
    slot: int
    prompt_len: int
    tokens: list[int]
    drafts: list[NDArray[np.int64]] = field(default_factory=list)
    raw: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the newest token, which the target has not run yet."""
        return self.prompt_len + len(self.tokens) - 1


class BlockCollector:
    """Answers prompts greedily, drafting behind every token, and picks the blocks that speculation meets."""

    def __init__(
        self,
        model: DeepseekV41Model,
        draft: DraftModel,
        *,
        gamma: int,
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        """Prepare.

        Args:
            model: The target.
            draft: Its draft head.
            gamma: Drafts of a block.
            max_new_tokens: Tokens of an answer that does not end by itself.
            device: Where the model is.
        """
        self._model, self._draft = model, draft
        self._gamma, self._max_new_tokens = gamma, max_new_tokens
        self._device = device

    @torch.inference_mode()
    def collect(self, prompts: Sequence[Sequence[int]]) -> list[Blocks]:
        """The blocks of each prompt."""
        blocks = []
        for start in range(0, len(prompts), _GROUP):
            blocks += self._answer(prompts[start : start + _GROUP])
        return blocks

    def _answer(self, prompts: Sequence[Sequence[int]]) -> list[Blocks]:
        # Behind the last token that counts come gamma more, so that its drafts can be judged.
        longest = max(map(len, prompts)) + self._max_new_tokens + self._gamma + 1
        num_columns = -(-longest // _PAGE_SIZE)
        sizes = RunnerSizes(
            page_size=_PAGE_SIZE,
            num_pages=num_columns * len(prompts),
            num_slots=len(prompts) + 1,
            num_columns=num_columns,
            context_length=longest,
        )
        runner = PlacedRunner(self._model, sizes, self._device)
        cache = _native.RadixCache(page_size=_PAGE_SIZE, num_pages=sizes.num_pages)
        runs = []
        for slot, prompt in enumerate(prompts, start=1):
            planner = RequestPlanner(
                cache, slot=slot, page_size=_PAGE_SIZE, num_columns=num_columns
            )
            runs.append(self._prefill(runner, planner, slot, prompt))
        running = runs
        while running := [run for run in running if not self._is_done(run)]:
            self._draft_behind(runner, running)
            plans = [run.planner.step([-1], run.position, (), tail_len=1) for run in running]
            batch = runner.prepare(merge_plans(plans))
            ids = runner.forward(batch).argmax(1)
            runner.keep_sampled(batch, ids)
            for run, token in zip(running, ids.tolist(), strict=True):
                run.tokens.append(token)
        return [self._rounds(run) for run in runs]

    def _prefill(
        self, runner: PlacedRunner, planner: RequestPlanner, slot: int, prompt: Sequence[int]
    ) -> _Run:
        """The prompt as a server runs it: the late layers see its last window only."""
        window = self._model.config.sliding_window
        planner.floors.tail = max(len(prompt) - window, 0)
        plan = planner.step(prompt, 0, (), tail_len=min(window, len(prompt)))
        token = runner.forward(runner.prepare(plan)).argmax(1)
        runner.seed_token(slot, len(prompt), token)
        return _Run(planner, slot, len(prompt), [int(token)])

    def _draft_behind(self, runner: PlacedRunner, running: Sequence[_Run]) -> None:
        def put(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=self._device)

        positions = put([run.position for run in running])
        history = history_rows(
            put([run.slot for run in running]),
            positions - 1,
            put([run.planner.floors.tail for run in running]),
            window=self._model.config.sliding_window,
            ring_rows=runner.pools.layout.window_ring_rows,
        )
        proposal = self._draft.propose(
            put([run.tokens[-1] for run in running]),
            positions,
            history,
            gamma=self._gamma,
            pools=runner.pools,
        )
        drafts, raw = proposal.ids.cpu().numpy(), proposal.confidence_raw.double().cpu().numpy()
        for row, run in enumerate(running):
            run.drafts.append(drafts[row])
            run.raw.append(raw[row])

    def _end(self, run: _Run) -> int:
        """Tokens of the answer, the last one included."""
        eos = set(self._model.config.eos_token_ids)
        ends = (i + 1 for i, token in enumerate(run.tokens) if token in eos)
        return min(next(ends, self._max_new_tokens), self._max_new_tokens)

    def _is_done(self, run: _Run) -> bool:
        return len(run.tokens) >= self._end(run) + self._gamma

    def _rounds(self, run: _Run) -> Blocks:
        """The blocks behind the anchors of greedy rounds that verify every draft."""
        raw, accepted, anchor = [], [], 0
        while anchor < self._end(run) - 1:
            following = run.tokens[anchor + 1 : anchor + 1 + self._gamma]
            mask = np.logical_and.accumulate(run.drafts[anchor] == np.array(following))
            raw.append(run.raw[anchor])
            accepted.append(mask)
            anchor += int(mask.sum()) + 1
        shape = (len(raw), self._gamma)
        return Blocks(
            np.array(raw, dtype=np.float64).reshape(shape),
            np.array(accepted, dtype=np.bool_).reshape(shape),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Temperatures, and the calibration errors on prompts that they were not fitted on."""

    calibration: Calibration
    held_out_before: list[float]
    held_out_after: list[float]
    num_held_out: int


def calibrate(blocks: Sequence[Blocks]) -> Report:
    """Fit on most prompts and measure on the rest.

    Raises:
        ConfigError: Too few prompts or answers.
    """
    fitted = Blocks.joined([part for i, part in enumerate(blocks) if i % _HELD_OUT] or blocks)
    others = Blocks.joined([part for i, part in enumerate(blocks) if i % _HELD_OUT == 0])
    if len(blocks) < 2 * _HELD_OUT or not len(others.raw):
        raise ConfigError(
            f"{len(blocks)} prompts with {len(fitted.raw) + len(others.raw)} blocks are too few to fit and to test "
            "temperatures: give more prompts or longer answers"
        )
    calibration = fit_temperatures(fitted.raw, fitted.accepted)
    ones = np.ones(fitted.raw.shape[1])
    return Report(
        calibration,
        calibration_errors(others.raw, others.accepted, ones),
        calibration_errors(others.raw, others.accepted, np.array(calibration.temperatures)),
        len(others.raw),
    )


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(list(argv))
    torch.set_num_threads(1)
    try:
        config = load_model_config(options.model_path)
        gamma = _block_size(config, options.speculative_num_draft_tokens)
        prompts = (
            built_in_prompts(options.model_path, config)
            if options.prompts is None
            else read_prompts(options.prompts, options.model_path, config)
        )
        device = torch.device(options.device)
        model = load_model(
            options.model_path,
            config,
            numerics=options.numerics,
            context_length=config.max_position_embeddings,
            device=device,
            draft=True,
        )
        if model.draft is None:
            raise ConfigError(f"{options.model_path} has no DSpark head")
        room = config.max_position_embeddings - max(map(len, prompts)) - gamma
        collector = BlockCollector(
            model,
            model.draft,
            gamma=gamma,
            max_new_tokens=min(options.max_new_tokens, room),
            device=device,
        )
        report = calibrate(collector.collect(prompts))
        write_temperatures(options.out, report.calibration)
    except DsserveError as error:
        sys.stderr.write(f"dsserve calibrate dspark: {error}\n")
        return 2
    sys.stdout.write(_table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsserve calibrate dspark", description=__doc__)
    parser.add_argument("--model-path", required=True, type=Path)
    parser.add_argument(
        "--prompts",
        type=Path,
        help="JSON lines: chat bodies (messages), prompt or input_ids; small built-in tasks if left out",
    )
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        help="as of the server: drafts of a block plus one; the block size of the checkpoint if left out",
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--numerics", choices=("released", "fp32"), default="released")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser


def _block_size(config: ModelConfig, num_draft_tokens: int | None) -> int:
    if not config.has_draft:
        raise ConfigError("the checkpoint has no DSpark head")
    gamma = config.dspark_block_size if num_draft_tokens is None else num_draft_tokens - 1
    if not 1 <= gamma <= config.dspark_block_size:
        raise ConfigError(
            f"--speculative-num-draft-tokens {num_draft_tokens} must be 2 to {config.dspark_block_size + 1}"
        )
    return gamma


def _table(report: Report) -> str:
    calibration = report.calibration
    lines = ["draft  temperature  error before  error after  (on prompts not fitted on)"]
    rows = zip(calibration.temperatures, report.held_out_before, report.held_out_after, strict=True)
    for k, (temperature, before, after) in enumerate(rows, start=1):
        lines.append(f"{k:5d}  {temperature:11.3f}  {before:12.4f}  {after:11.4f}")
    lines.append(f"fitted on {calibration.num_blocks} blocks, tested on {report.num_held_out}")
    return "\n".join(lines) + "\n"
