"""Trains the target for a given time, resumable; writes masters, a log and an evaluation table.

python -m tools.tiny_model.train --out DIR --seconds 540 [--resume DIR] [--phase1 0.5]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tools.tiny_model import ops
from tools.tiny_model.checkpoint import load_masters, save_masters
from tools.tiny_model.config import engram_constants, model_config
from tools.tiny_model.model import Batch, Mode, Target
from tools.tiny_model.optim import Optimizer, rate_at
from tools.tiny_model.packing import FIELDS, Loader
from tools.tiny_model.params import Weights, build_groups, cook, init_masters
from tools.tiny_model.ranks import SEED_STRIDE, Ranks
from tools.tiny_model.scoring import evaluate_target
from tools.tiny_model.verdicts import show_table, write_verdicts
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)
TOKENIZER = Path(__file__).with_name("tokenizer.json")
_INDEX_SHARE = 8
_BIAS_RATE = 0.003
_GRAPH_WARMUP = 3


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the schedule.

    Attributes:
        length: Tokens per row.
        rows: Rows per step.
        dense: Attend every visible row instead of the selected ones.
        index_weight: Weight of the index loss.
    """

    length: int
    rows: int
    dense: bool
    index_weight: float


class Trainer:
    """Masters, optimiser and the step of each phase."""

    def __init__(
        self, device: torch.device, ranks: Ranks, *, resume: Path | None, seed: int
    ) -> None:
        self.ranks = ranks
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.config = model_config(tokenizer)
        self.device = device
        self.target = Target(
            self.config, engram_constants(self.config, tokenizer), length=4096, device=device
        )
        self.groups = build_groups(self.config, draft=False)
        masters = (
            load_masters(resume, "target")
            if resume
            else init_masters(self.groups, self.config, seed=seed)
        )
        self.masters = {key: value.to(device) for key, value in masters.items()}
        self.cooked = {
            group.key: cook(group, self.masters[group.key]).requires_grad_()
            for group in self.groups
        }
        self.optimizer = Optimizer(self.groups, self.masters, self.config)
        self.replay = torch.zeros(2, dtype=torch.int32, device=device)
        self.bias_rate = torch.zeros((), device=device)

    def cook(self) -> None:
        """Refresh what the forward sees from the masters."""
        with torch.no_grad():
            for group in self.groups:
                self.cooked[group.key].copy_(cook(group, self.masters[group.key]))

    def weights(self) -> Weights:
        """The cooked weights as the forward takes them."""
        return Weights(self.groups, self.cooked, lambda tensor: tensor)

    def step(self, data: dict[str, Tensor], phase: Phase) -> Tensor:
        """One update; returns [answer loss, answer accuracy, prompt loss, index loss, least expert share]."""
        self.cook()
        mode = Mode(
            dense=phase.dense,
            index_rows=data["index_rows"],
            encoder_replay=self.replay[0],
            decoder_replay=self.replay[1],
        )
        weights = self.weights()
        out = self.target.forward(weights, Batch(data["ids"], data["start"], data["floor"]), mode)
        losses, right = ops.token_losses(
            self.target.logits(weights, out.hidden), data["target"].flatten()
        )
        weight = data["weight"].flatten()
        index_loss = torch.stack(out.index_losses).mean()
        loss = (losses * weight).sum() / weight.sum() + phase.index_weight * index_loss
        keys = self.optimizer.keys
        gradients = torch.autograd.grad(loss, [self.cooked[key] for key in keys])
        self.optimizer.step(list(gradients))
        loads = torch.stack(out.loads)
        with torch.no_grad():
            bias = self.masters["layers.*.ffn.gate.bias"]
            bias.add_(self.bias_rate * torch.sign(loads.mean(1, keepdim=True) - loads))
            answer = (weight > 0.35).float()
            prompt = ((weight > 0) & (weight < 0.2)).float()
            return torch.stack((
                (losses * answer).sum() / answer.sum(), (right * answer).sum() / answer.sum(),
                (losses * prompt).sum() / prompt.sum().clamp_min(1), index_loss, loads.min(),
            ))  # fmt: skip

    def run_phase(self, phase: Phase, clock: Clock, options: argparse.Namespace) -> None:
        """Train until the phase's end of the clock."""
        loader = Loader(
            TOKENIZER, seed=options.seed + clock.step + phase.length + SEED_STRIDE * self.ranks.index,
            length=phase.length, rows=phase.rows, workers=options.workers,
        )  # fmt: skip
        rng = np.random.default_rng(clock.step)
        data = _buffers(phase, self.device)
        try:
            self._steps(phase, clock, options, loader, rng, data)
        finally:
            loader.close()

    def _steps(
        self, phase: Phase, clock: Clock, options: argparse.Namespace, loader: Loader, rng: np.random.Generator,
        data: dict[str, Tensor],
    ) -> None:  # fmt: skip
        _fill(data, loader.next(), phase, rng)
        graph, stats = self._capture(phase, data)
        self.ranks.meet()
        clock.start()
        began, first = time.monotonic(), clock.step
        finished = False
        while not finished:
            progress = clock.progress()
            rate = rate_at(
                progress, clock.step, peak=options.rate, warmup=options.warmup, decay_from=options.decay_from,
                least=options.least,
            )  # fmt: skip
            self.optimizer.rate.fill_(rate)
            self.bias_rate.fill_(_BIAS_RATE * rate / options.rate)
            replays = progress > options.replay_from
            self.replay.copy_(
                torch.tensor([replays and clock.step % 4 == 0, replays and clock.step % 2 == 0])
            )
            _fill(data, loader.next(), phase, rng)
            if graph is None:
                stats = self.step(data, phase)
            else:
                graph.replay()
            clock.step += 1
            if self.ranks.count == 1:
                finished = clock.done()
            elif self.ranks.is_due(clock.step):
                self.ranks.average(self.masters.values())
                finished = self.ranks.agree(
                    done=clock.done() if self.ranks.is_first else False, device=self.device
                )
            if clock.step % options.log_every == 0 and self.ranks.is_first:
                values = stats.tolist()
                tokens = (clock.step - first) * phase.rows * phase.length * self.ranks.count
                speed = tokens / (time.monotonic() - began)
                logger.info(
                    "step %d T %d rate %.5f answer %.4f acc %.4f prompt %.3f index %.4f load %.3f | %.0f tok/s queue %d t %.0f",
                    clock.step, phase.length, rate, *values, speed, loader.waiting(), clock.elapsed(),
                )  # fmt: skip
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _capture(self, phase: Phase, data: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """The step as one CUDA graph; on the CPU nothing is captured."""
        if self.device.type != "cuda":
            return None, torch.zeros(5)
        saved = {key: value.clone() for key, value in self.masters.items()}
        self.optimizer.rate.zero_()
        self.bias_rate.zero_()
        began = time.monotonic()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_GRAPH_WARMUP):
                self.step(data, phase)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        logger.info("warm after %.1f s", time.monotonic() - began)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stats = self.step(data, phase)
        for key, value in saved.items():
            self.masters[key].copy_(value)
        torch.cuda.synchronize()
        logger.info(
            "captured after %.1f s, %.1f GB",
            time.monotonic() - began,
            torch.cuda.max_memory_allocated() / 1e9,
        )
        return graph, stats


class Clock:
    """Time of the schedule; compilation before a phase's first step does not count."""

    def __init__(self, seconds: float, ends: list[float]) -> None:
        """`ends`: progress at which each phase ends, ascending, the last 1."""
        self.seconds, self._ends = seconds, ends
        self.step = 0
        self._before, self._started, self._phase = 0.0, time.monotonic(), -1

    def start(self) -> None:
        """A phase begins to train."""
        self._phase += 1
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds of training so far."""
        return self._before + time.monotonic() - self._started

    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        return self.elapsed() / self.seconds

    def done(self) -> bool:
        """Whether the phase is over; stops its time then."""
        if self.progress() < self._ends[self._phase]:
            return False
        self._before = self.elapsed()
        self._started = time.monotonic()
        return True


def _buffers(phase: Phase, device: torch.device) -> dict[str, Tensor]:
    kinds = {
        "ids": torch.int64,
        "target": torch.int64,
        "weight": torch.float32,
        "start": torch.int32,
        "floor": torch.int32,
    }
    data = {
        name: torch.zeros(phase.rows, phase.length, dtype=kinds[name], device=device)
        for name in FIELDS
    }
    data["index_rows"] = torch.zeros(phase.length // _INDEX_SHARE, dtype=torch.int64, device=device)
    return data


def _fill(
    data: dict[str, Tensor], batch: dict[str, NDArray[Any]], phase: Phase, rng: np.random.Generator
) -> None:
    for name in FIELDS:
        data[name].copy_(torch.from_numpy(batch[name]))
    rows = np.arange(0, phase.length, _INDEX_SHARE) + rng.integers(
        0, _INDEX_SHARE, phase.length // _INDEX_SHARE
    )
    data["index_rows"].copy_(torch.from_numpy(rows))


def build_parser() -> argparse.ArgumentParser:
    """Options of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="0: no training, only the evaluation"
    )
    parser.add_argument(
        "--phase1", type=float, default=0.5, help="share of the time with dense attention"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per step")
    parser.add_argument("--length1", type=int, default=1024)
    parser.add_argument("--length2", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=80)
    parser.add_argument("--decay-from", type=float, default=0.5)
    parser.add_argument(
        "--least", type=float, default=0.01, help="last learning rate as a share of the peak"
    )
    parser.add_argument("--replay-from", type=float, default=0.65)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--eval-count", type=int, default=64)
    parser.add_argument("--no-compile", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    is_gpu = torch.cuda.is_available()
    ranks = Ranks()
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    if is_gpu and options.seconds > 0 and not options.no_compile:
        ops.enable_compile()
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(device, ranks, resume=options.resume, seed=options.seed)
    phases = [
        Phase(options.length1, options.tokens // options.length1, dense=True, index_weight=0.3),
        Phase(options.length2, options.tokens // options.length2, dense=False, index_weight=1.0),
    ]
    ends = [options.phase1, 1.0]
    if options.phase1 <= 0:
        phases, ends = phases[1:], ends[1:]
    clock = Clock(options.seconds, ends)
    for phase in phases if options.seconds > 0 else ():
        trainer.run_phase(phase, clock, options)
        if ranks.is_first:
            save_masters(options.out, "target", trainer.masters)
    ranks.close()
    if not ranks.is_first:
        return 0
    logger.info("saved after %d steps", clock.step)
    trainer.cook()
    ops.disable_compile()
    table = evaluate_target(trainer.target, trainer.weights(), TOKENIZER, count=options.eval_count)
    write_verdicts(options.out / "target_eval.json", table)
    logger.info("%s", show_table(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
