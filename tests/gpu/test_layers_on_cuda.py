"""Each layer on the device, fed what the reference path on the CPU has there: streams, pre-mixes, selection, caches.

Numerics `released`, where a whole forward is chaotic: here no difference reaches the next layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from layer_prompts import PROMPTS_A, PROMPTS_G, device_model, run_layers

if TYPE_CHECKING:
    from pathlib import Path


DEVICE = "cuda:0"


def check(path: Path, prompt: str) -> None:
    found = run_layers(path, prompt, device_model(path, DEVICE), DEVICE)
    print(f"\nlayers of {path.name} {prompt}: {found.summary()}")
    assert found.failures == []


@pytest.mark.parametrize("prompt", PROMPTS_A)
def test_layers_of_checkpoint_a_agree_on_the_same_inputs(golden_a: Path, prompt: str) -> None:
    check(golden_a, prompt)


@pytest.mark.parametrize("prompt", PROMPTS_G)
def test_layers_of_checkpoint_g_agree_on_the_same_inputs(golden_geom: Path, prompt: str) -> None:
    check(golden_geom, prompt)
