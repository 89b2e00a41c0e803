"""Training forward against the golden data, rounding against the operators, export against the loader."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from tools.tiny_model import quantise
from tools.tiny_model.checkpoint import load_masters, save_masters
from tools.tiny_model.draft import Draft
from tools.tiny_model.export import export
from tools.tiny_model.model import Batch, Mode, Target
from tools.tiny_model.optim import Optimizer, orthogonalise, rate_at
from tools.tiny_model.params import (
    Weights,
    build_groups,
    cook,
    init_masters,
    masters_from_checkpoint,
)

from dsserve.config.model import ModelConfig, load_model_config
from dsserve.engram.hashing import build_engram_constants, load_token_map
from dsserve.models.deepseek_v4.weight_codes import decode_fp4, decode_fp8, encode_fp4, encode_fp8
from dsserve.models.deepseek_v4.weights import load_checkpoint
from dsserve_kernels.reference import quant

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "data" / "v41-tiny-a"
torch.set_num_threads(1)


class Golden:
    """Checkpoint A in the training forward, float32 without activation rounding."""

    def __init__(self) -> None:
        self.config: ModelConfig = load_model_config(GOLDEN)
        constants = build_engram_constants(
            self.config, load_token_map(GOLDEN / "tokenizer.json", self.config.vocab_size)
        )
        tensors = load_checkpoint(GOLDEN, self.config, draft=True)
        self.target = Target(self.config, constants, length=256, device=torch.device("cpu"))
        self.weights, self.draft_weights = (
            self._weights(tensors, draft=draft) for draft in (False, True)
        )
        self.main = load_file(GOLDEN / "golden.safetensors")
        self.fp32 = load_file(GOLDEN / "golden_fp32.safetensors")

    def _weights(self, tensors: dict[str, Tensor], *, draft: bool) -> Weights:
        groups = build_groups(self.config, draft=draft)
        masters = masters_from_checkpoint(groups, tensors)
        return Weights(
            groups, {g.key: cook(g, masters[g.key]) for g in groups}, lambda t: t.float()
        )

    def batch(self, *parts: Tensor) -> tuple[Batch, list[slice]]:
        """One row that holds every part at a multiple of 8, and where each lies."""
        length = sum(-(-len(part) // 8) * 8 for part in parts) + 16
        ids = torch.zeros(1, -(-length // 16) * 16, dtype=torch.long)
        start, places, used = torch.zeros(ids.shape, dtype=torch.int32), [], 0
        for part in parts:
            ids[0, used : used + len(part)] = part
            start[0, used:] = used
            places.append(slice(used, used + len(part)))
            used += -(-len(part) // 8) * 8
        return Batch(ids, start, torch.zeros_like(start)), places

    def run(self, batch: Batch, *, dense: bool = False) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out = self.target.forward(
                self.weights, batch, Mode(dense=dense, quantize=False), dtype=torch.float32
            )
            return self.target.logits(self.weights, out.hidden), out.taps


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.mark.parametrize(
    ("prompt", "dense"), [("len33", True), ("len17", False), ("len33", False), ("len100", False)]
)
def test_forward_matches_the_golden_logits(golden: Golden, prompt: str, dense: bool) -> None:
    expected = golden.fp32[f"{prompt}.dense.logits" if dense else f"{prompt}.logits"]
    batch, (place,) = golden.batch(golden.main[f"{prompt}.input_ids"].long())
    distance = (
        (golden.run(batch, dense=dense)[0][place][-len(expected) :] - expected).abs().amax(-1)
    )
    # A stored code that flips on a rounding error moves the rows that see it by about 0.05 and more.
    assert float(distance.median()) < (0.1 if prompt == "len100" else 1e-3)
    assert float((distance < 0.2).double().mean()) > 0.8


def test_samples_of_a_row_do_not_see_each_other(golden: Golden) -> None:
    first, second = (golden.main[f"{prompt}.input_ids"].long() for prompt in ("len33", "len64"))
    batch, (_, place) = golden.batch(first, second)
    other, _ = golden.batch((first + 7) % golden.config.vocab_size, second)
    assert torch.equal(golden.run(batch)[0][place], golden.run(other)[0][place])


def test_draft_block_matches_the_golden_drafts(golden: Golden) -> None:
    prompt = golden.main["len17.input_ids"].long()
    tokens = golden.fp32["len17.greedy.tokens"].long()
    batch, _ = golden.batch(torch.cat((prompt, tokens)))
    taps = golden.run(batch)[1]
    anchors = torch.arange(31) + len(prompt)
    draft = Draft(golden.config, golden.target.window_table)
    with torch.no_grad():
        block = draft.block(
            golden.weights, golden.draft_weights, taps, batch, anchors, quantize=False
        )
        drafts, confidence = draft.propose(golden.draft_weights, block, batch.ids[0][anchors + 1])
    expected = golden.fp32["len17.greedy.draft_ids"].long()
    assert float((drafts == expected[:, 1:]).double().mean()) > 0.97
    assert float((confidence - golden.fp32["len17.greedy.draft_confidence"]).abs().median()) < 0.05


def test_rounding_is_that_of_the_operators() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator) * torch.logspace(-6, 3, 64).unsqueeze(1)
    x[0, :32] = 0.0
    bf16 = x.to(torch.bfloat16)
    assert torch.equal(quantise.fp8_rows(bf16), quant.round_fp8(bf16))
    assert torch.equal(quantise.fp4_index(bf16), quant.round_fp4_index(bf16))
    assert torch.equal(quantise.fp4_main(bf16), quant.round_fp4_main(bf16))


def test_weights_round_to_what_the_checkpoint_stores() -> None:
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    x[:32, :32] = 0.0
    assert torch.equal(
        quantise.weight_fp8(x[None])[0], decode_fp8(*encode_fp8(x, block_rows=32, block_columns=32))
    )
    assert torch.equal(
        quantise.weight_rows_fp8(x), decode_fp8(*encode_fp8(x, block_rows=1, block_columns=32))
    )
    assert torch.equal(quantise.weight_fp4(x), decode_fp4(*encode_fp4(x, block=32)))


def test_straight_through_passes_the_gradient() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    quantise.straight_through(x, quantise.fp8_rows).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_exported_checkpoint_loads_strictly_with_the_trained_values(tmp_path: Path) -> None:
    config = load_model_config_of_export(tmp_path)
    groups = build_groups(config, draft=False)
    masters = load_masters(tmp_path / "masters", "target")
    loaded = masters_from_checkpoint(groups, load_checkpoint(tmp_path / "out", config, draft=True))
    for group in groups:
        assert torch.equal(cook(group, masters[group.key]).float(), loaded[group.key]), group.key
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) < 18_000_000


def load_model_config_of_export(folder: Path) -> ModelConfig:
    """Export random masters, return the configuration of the result."""
    from tokenizers import Tokenizer
    from tools.tiny_model.config import model_config
    from tools.tiny_model.export import TOKENIZER

    config = model_config(Tokenizer.from_file(str(TOKENIZER)))
    save_masters(
        folder / "masters",
        "target",
        init_masters(build_groups(config, draft=False), config, seed=3),
    )
    export(folder / "masters", folder / "out")
    return load_model_config(folder / "out")


def test_orthogonalised_updates_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(
        orthogonalise(torch.randn(3, 48, 96, generator=torch.Generator().manual_seed(2)))
    )
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.5


def test_learning_rate_rises_holds_and_falls() -> None:
    def rate(progress: float, step: int) -> float:
        return rate_at(progress, step, peak=1.0, warmup=10, decay_from=0.5, least=0.1)

    assert [rate(0.0, 0), rate(0.4, 50), rate(1.0, 99)] == pytest.approx([0.1, 1.0, 0.1])


def test_optimiser_lowers_a_quadratic_loss(golden: Golden) -> None:
    groups = [
        g
        for g in build_groups(golden.config, draft=False)
        if g.key in ("layers.*.attn.wkv.weight", "norm.weight")
    ]
    masters = init_masters(groups, golden.config, seed=0)
    optimizer = Optimizer(groups, masters, golden.config)
    optimizer.rate.fill_(1e-2)
    before = sum(float(masters[key].square().sum()) for key in optimizer.keys)
    for _ in range(20):
        optimizer.step([masters[key].clone() for key in optimizer.keys])
    assert sum(float(masters[key].square().sum()) for key in optimizer.keys) < 0.8 * before


def test_accept_length_counts_whole_answers(tmp_path: Path) -> None:
    from random import Random

    from tokenizers import Tokenizer
    from tools.tiny_model.acceptance import AcceptanceMeter
    from tools.tiny_model.config import model_config
    from tools.tiny_model.data.example import ask
    from tools.tiny_model.export import TOKENIZER
    from tools.tiny_model.render import Renderer

    config = model_config(Tokenizer.from_file(str(TOKENIZER)))
    for draft in (False, True):
        groups = build_groups(config, draft=draft)
        save_masters(tmp_path, "draft" if draft else "target", init_masters(groups, config, seed=1))
    sample = Renderer(TOKENIZER).sample(ask("t", "Say this", "this and that"), Random(1))
    tokens, rounds = AcceptanceMeter.of_masters(tmp_path).rounds(sample)
    # The first token of the answer is the first anchor; random drafts are hardly ever right.
    assert tokens == len(sample.ids) - sample.prompt_len - 1
    assert tokens / 6 <= rounds <= tokens
