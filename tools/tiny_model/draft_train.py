"""Trains the DSpark head on the frozen target, resumable (dspark.md section 1).

python -m tools.tiny_model.draft_train --target DIR --out DIR --seconds 150 [--resume DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tools.tiny_model import ops
from tools.tiny_model.checkpoint import load_masters, save_masters
from tools.tiny_model.config import engram_constants, model_config
from tools.tiny_model.draft import Draft
from tools.tiny_model.model import Batch, Mode, Target
from tools.tiny_model.optim import Optimizer, rate_at
from tools.tiny_model.packing import FIELDS, Loader
from tools.tiny_model.params import Weights, build_groups, cook, init_masters
from tools.tiny_model.ranks import SEED_STRIDE, Ranks
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)
TOKENIZER = Path(__file__).with_name("tokenizer.json")
_ANSWER_WEIGHT = 0.35
_CONFIDENCE_SHARE = 0.2
_BIAS_RATE = 0.003


class DraftTrainer:
    """Trains the head; the target is frozen."""

    def __init__(
        self, device: torch.device, ranks: Ranks, target_folder: Path, *, resume: Path | None,
        anchors: int, seed: int,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.config = model_config(tokenizer)
        self.device, self.num_anchors = device, anchors
        self.target = Target(
            self.config, engram_constants(self.config, tokenizer), length=4096, device=device
        )
        groups = build_groups(self.config, draft=False)
        masters = load_masters(target_folder, "target")
        self._target_weights = Weights(
            groups, {g.key: cook(g, masters[g.key].to(device)) for g in groups}, lambda t: t
        )
        self.groups = build_groups(self.config, draft=True)
        start = self._start(resume, seed)
        self.masters = {key: value.to(device) for key, value in start.items()}
        self.cooked = {g.key: cook(g, self.masters[g.key]).requires_grad_() for g in self.groups}
        self.optimizer = Optimizer(self.groups, self.masters, self.config)
        self.draft = Draft(self.config, self.target.window_table)
        self.bias_rate = torch.zeros((), device=device)

    def _start(self, resume: Path | None, seed: int) -> dict[str, Tensor]:
        """Masters of an earlier run, or fresh ones."""
        if resume is not None:
            return load_masters(resume, "draft")
        start = init_masters(self.groups, self.config, seed=seed)
        for key in start:
            if "markov_head.head" in key:
                start[key] *= 0.1
        return start

    def losses(self, data: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Loss, statistics [TV, acceptance length, agreement of each draft..] and expert loads."""
        batch = Batch(data["ids"], data["start"], data["floor"])
        anchors, gamma = data["anchors"], self.config.dspark_block_size
        weights = Weights(self.groups, self.cooked, lambda tensor: tensor)
        rows = anchors.unsqueeze(1) + torch.arange(1, gamma + 1, device=self.device)
        with torch.no_grad():
            out = self.target.forward(self._target_weights, batch, Mode())
            wanted = self.target.logits(self._target_weights, out.hidden[rows.flatten()]).float()
            wanted = wanted.view(*rows.shape, -1)
            valid = (data["weight"].flatten()[rows] > _ANSWER_WEIGHT).cumprod(1).float()
        block = self.draft.block(self._target_weights, weights, out.taps, batch, anchors)
        embedded, bias = self.draft.markov(weights, batch.ids.flatten()[rows])
        raw = self.draft.confidence(weights, block.hidden, embedded)
        cross, distance, same = draft_losses(block.base, bias, wanted)
        sure = binary_cross_entropy_with_logits(
            raw, (1 - distance).detach().clamp(0, 1), reduction="none"
        )
        total = valid.sum().clamp_min(1)
        loss = ((cross + distance + _CONFIDENCE_SHARE * sure) * valid).sum() / total
        with torch.no_grad():
            accepted = (same * valid).cumprod(1)
            whole = valid[:, -1]
            length = 1 + (accepted.sum(1) * whole).sum() / whole.sum().clamp_min(1)
            agreement = (same * valid).sum(0) / valid.sum(0).clamp_min(1)
            stats = torch.cat((torch.stack(((distance * valid).sum() / total, length)), agreement))
        return loss, stats, block.loads

    def step(self, data: dict[str, Tensor]) -> Tensor:
        """One update; returns the statistics."""
        with torch.no_grad():
            for group in self.groups:
                self.cooked[group.key].copy_(cook(group, self.masters[group.key]))
        loss, stats, loads = self.losses(data)
        keys = self.optimizer.keys
        self.optimizer.step(list(torch.autograd.grad(loss, [self.cooked[key] for key in keys])))
        with torch.no_grad():
            load = torch.stack(loads)
            bias = self.masters["mtp.*.ffn.gate.bias"]
            bias.add_(self.bias_rate * torch.sign(load.mean(1, keepdim=True) - load))
        return stats

    def train(self, options: argparse.Namespace) -> None:
        """Train for the given time."""
        rows = options.tokens // options.length
        loader = Loader(
            TOKENIZER,
            seed=options.seed + 77 + SEED_STRIDE * self.ranks.index,
            length=options.length,
            rows=rows,
            workers=options.workers,
        )
        rng = np.random.default_rng(options.seed + self.ranks.index)
        data = {
            "ids": torch.zeros(rows, options.length, dtype=torch.int64, device=self.device),
            "anchors": torch.zeros(self.num_anchors, dtype=torch.int64, device=self.device),
        }
        for name, kind in (
            ("weight", torch.float32),
            ("start", torch.int32),
            ("floor", torch.int32),
        ):
            data[name] = torch.zeros(rows, options.length, dtype=kind, device=self.device)
        try:
            self._loop(options, loader, rng, data)
        finally:
            loader.close()

    def _loop(
        self,
        options: argparse.Namespace,
        loader: Loader,
        rng: np.random.Generator,
        data: dict[str, Tensor],
    ) -> None:
        self._fill(data, loader, rng)
        graph, stats = self._capture(data)
        self.ranks.meet()
        began, step, finished = time.monotonic(), 0, False
        while not finished:
            progress = min(1.0, (time.monotonic() - began) / options.seconds)
            rate = rate_at(progress, step, peak=options.rate, warmup=50, decay_from=0.4, least=0.01)
            self.optimizer.rate.fill_(rate)
            self.bias_rate.fill_(_BIAS_RATE * rate / options.rate)
            self._fill(data, loader, rng)
            if graph is None:
                stats = self.step(data)
            else:
                graph.replay()
            step += 1
            if self.ranks.count == 1:
                finished = progress >= 1
            elif self.ranks.is_due(step):
                self.ranks.average(self.masters.values())
                finished = self.ranks.agree(done=progress >= 1, device=self.device)
            if step % options.log_every == 0 and self.ranks.is_first:
                shown = " ".join(f"{value:.3f}" for value in stats.tolist())
                logger.info(
                    "draft step %d rate %.5f | TV, length, agreement: %s | t %.0f",
                    step,
                    rate,
                    shown,
                    time.monotonic() - began,
                )

    def _capture(self, data: dict[str, Tensor]) -> tuple[Any, Tensor]:
        if self.device.type != "cuda":
            return None, torch.zeros(7)
        saved = {key: value.clone() for key, value in self.masters.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(data)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stats = self.step(data)
        for key, value in saved.items():
            self.masters[key].copy_(value)
        logger.info("captured")
        return graph, stats

    def _fill(self, data: dict[str, Tensor], loader: Loader, rng: np.random.Generator) -> None:
        batch = loader.next()
        for name in FIELDS:
            if name in data:
                data[name].copy_(torch.from_numpy(batch[name]))
        data["anchors"].copy_(
            torch.from_numpy(
                choose_anchors(
                    batch["weight"], rng, self.num_anchors, self.config.dspark_block_size
                )
            )
        )


def choose_anchors(weight: Any, rng: np.random.Generator, count: int, gamma: int) -> Any:
    """Random flat positions t0 whose anchor t0 + 1 has a target inside an answer."""
    usable = np.zeros(weight.shape, dtype=bool)
    usable[:, : -gamma - 1] = weight[:, 1:-gamma] > _ANSWER_WEIGHT
    places = np.flatnonzero(usable.reshape(-1))
    return rng.choice(places, count, replace=len(places) < count).astype(np.int64)


@ops.fused
def draft_losses(base: Tensor, bias: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy to the target's distribution, total variation, and whether the arg-max agrees; [A, gamma] each."""
    logits = base.float() + bias.float()
    log_q, p = torch.log_softmax(logits, -1), torch.softmax(wanted, -1)
    cross = -(p * log_q).sum(-1)
    distance = 0.5 * (p - log_q.exp()).abs().sum(-1)
    return cross, distance, (logits.argmax(-1) == wanted.argmax(-1)).float()


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None, help="masters of an earlier head")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=3072)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--log-every", type=int, default=50)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    is_gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    if is_gpu:
        ops.enable_compile()
    ranks = Ranks()
    trainer = DraftTrainer(
        torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu"),
        ranks,
        options.target,
        resume=options.resume,
        anchors=options.anchors,
        seed=options.seed,
    )
    trainer.train(options)
    ranks.close()
    if not ranks.is_first:
        return 0
    save_masters(options.out, "draft", trainer.masters)
    (options.out / "draft.json").write_text(
        json.dumps({"seconds": options.seconds}), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
