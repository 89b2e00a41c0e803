"""The whole forward on a pretended CUDA device: every tensor of a step is there, and nothing is asked back.

The tensors have shapes and a device but no numbers, so a size or a branch that depends on numbers is an error; so is an
operation on tensors of two devices, or a copy from one to the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsserve import _native
from dsserve.config.model import load_model_config
from dsserve.debug.plans import RequestPlanner
from dsserve.engram.hashing import build_engram_constants, load_token_map
from dsserve.models.deepseek_v4.model import DeepseekV41Model
from dsserve.models.deepseek_v4.weights import load_weights
from dsserve.worker.runner import Runner, RunnerSizes
from dsserve.worker.tensor_tree import map_tensors
from dsserve_kernels.numerics import BY_NAME
from dsserve_kernels.reference import mhc, quant
from dsserve_kernels.select import select_operators
from dsserve_kernels.torch_device.tables import place_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsserve.worker.batch import PlanView

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
DEVICE = torch.device("cuda:0")
PAGE, COLUMNS = 16, 8


class OneDevice(TorchDispatchMode):
    """Refuses operations that see two devices."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert len(devices) <= 1, f"{func.__name__} sees {sorted(devices)}"
        return result


class Pretended:
    """Checkpoint A on the device, with its draft head."""

    def __init__(self, numerics: str) -> None:
        config = load_model_config(CHECKPOINT)
        token_map = load_token_map(CHECKPOINT / "tokenizer.json", config.vocab_size)
        tensors = load_weights(CHECKPOINT, config, draft=True)
        self.mode = FakeTensorMode()
        with self.mode:
            model = DeepseekV41Model(
                config,
                {name: self.mode.from_tensor(tensor) for name, tensor in tensors.items()},
                build_engram_constants(config, token_map),
                ops=select_operators("cuda", numerics),
                numerics=BY_NAME[numerics],
                context_length=128,
                device=DEVICE,
                draft=True,
            )
            sizes = RunnerSizes(PAGE, 2 * COLUMNS, 3, COLUMNS, 128)
            self.runner = Runner(model, sizes, DEVICE)
            place_tables(DEVICE)
        self.cache = _native.RadixCache(page_size=PAGE, num_pages=2 * COLUMNS)

    def forward(self, plan: PlanView, *, all_logits: bool = False) -> torch.Tensor:
        batch = self.runner.prepare(plan, all_logits=all_logits)
        with self.mode:
            placed = map_tensors(batch, lambda tensor: self.mode.from_tensor(tensor).to(DEVICE))
            with OneDevice():
                return self.runner.forward(placed)


def forget_tables() -> None:
    """Tables that were made of tensors without numbers, or by an earlier test."""
    quant._code_of_twice.cache_clear()
    mhc._scale_index.cache_clear()
    for key in [key for key in quant._PAIRS if key[0] == DEVICE]:
        del quant._PAIRS[key]


@pytest.fixture
def clean_tables() -> Iterator[None]:
    forget_tables()
    yield
    forget_tables()


@pytest.mark.slow
@pytest.mark.usefixtures("clean_tables")
@pytest.mark.parametrize("numerics", ["released", "fp32"])
def test_a_forward_stays_on_its_device(numerics: str) -> None:
    pretended = Pretended(numerics)
    planner = RequestPlanner(pretended.cache, slot=1, page_size=PAGE, num_columns=COLUMNS)
    ids = list(range(3, 103))
    open_chunk = pretended.forward(planner.step(ids[:64], 0, [], tail_len=64))
    assert open_chunk.device == DEVICE
    planner.floors.tail = 84
    last = pretended.forward(planner.step(ids[64:], 64, ids[:64], tail_len=16), all_logits=True)
    assert last.shape == (16, 512)
    decoded = pretended.forward(planner.step([-1], 100, (), tail_len=1))
    assert decoded.shape == (1, 512)


def test_the_check_sees_a_second_device() -> None:
    with FakeTensorMode(), OneDevice():
        x = torch.ones(2, device=DEVICE)
        with pytest.raises(AssertionError, match="sees"):
            x.to("cpu")
