"""Muon for matrices, AdamW for the rest, on stacked float32 masters; every step works on device tensors alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsserve.models.deepseek_v4.tensors import StorageType

if TYPE_CHECKING:
    from tools.tiny_model.params import Group

    from dsserve.config.model import ModelConfig

_MOMENTUM, _WEIGHT_DECAY, _ROUNDS = 0.95, 0.1, 5
_BETA1, _BETA2, _EPS = 0.9, 0.97, 1e-10
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor) -> Tensor:
    """Newton-Schulz rounds in BF16: [n, R, C] -> near-orthogonal matrices."""
    a, b, c = _COEFFICIENTS
    y = x.to(torch.bfloat16)
    tall = y.shape[1] > y.shape[2]
    y = y.transpose(1, 2) if tall else y
    y = y / (y.float().square().sum((1, 2), keepdim=True).sqrt().to(y.dtype) + 1e-7)
    for _ in range(_ROUNDS):
        gram = y @ y.transpose(1, 2)
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.transpose(1, 2) if tall else y).float()


def uses_muon(group: Group) -> bool:
    """Whether a group is a stack of ordinary weight matrices."""
    if (
        group.is_table
        or "indexer" in group.key
        or "markov" in group.key
        or "confidence" in group.key
    ):
        return False
    return group.kind in (StorageType.FP4, StorageType.F8_E4M3) or "compressor.w" in group.key


def _rate(key: str) -> float:
    if "engram.embed" in key:
        return 2.0
    if key in ("embed.weight", "head.weight") or "gate.weight" in key or "indexer" in key:
        return 0.5
    return 0.75


class Optimizer:
    """State and update of a list of groups."""

    def __init__(
        self, groups: list[Group], masters: dict[str, Tensor], config: ModelConfig
    ) -> None:
        self._groups = [group for group in groups if not group.key.endswith("gate.bias")]
        self._masters = masters
        self._state = {group.key: [torch.zeros_like(masters[group.key])] for group in self._groups}
        for group in self._groups:
            if not uses_muon(group):
                self._state[group.key].append(torch.zeros_like(masters[group.key]))
        device = next(iter(masters.values())).device
        self.rate = torch.zeros((), device=device)
        self._step = torch.zeros((), device=device)
        # Matrices that are several side by side: groups of heads, Engram keys and value.
        self._parts = {"attn.wo_a.weight": config.o_groups, "engram.wkv.weight": config.hc_mult + 1}

    @property
    def keys(self) -> list[str]:
        """Keys whose gradients `step` takes, in this order."""
        return [group.key for group in self._groups]

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        """Update the masters; `rate` is the learning rate of this step."""
        self._step += 1
        bias1, bias2 = 1 - _BETA1**self._step, 1 - _BETA2**self._step
        for group, gradient in zip(self._groups, gradients, strict=True):
            master, state = self._masters[group.key], self._state[group.key]
            g = gradient.float()
            state[0].lerp_(g, 1 - _MOMENTUM if len(state) == 1 else 1 - _BETA1)
            if len(state) == 1:
                self._muon(group, master, g.lerp(state[0], _MOMENTUM))
                continue
            state[1].mul_(_BETA2).addcmul_(g, g, value=1 - _BETA2)
            update = (state[0] / bias1) / ((state[1] / bias2).sqrt() + _EPS)
            master.sub_(update * (self.rate * _rate(group.key)))

    def _muon(self, group: Group, master: Tensor, update: Tensor) -> None:
        parts = next((count for end, count in self._parts.items() if group.key.endswith(end)), 1)
        split = update.view(update.shape[0] * parts, update.shape[1] // parts, update.shape[2])
        scale = 0.2 * math.sqrt(max(split.shape[1:]))
        direction = orthogonalise(split).view_as(update)
        master.mul_(1 - self.rate * _WEIGHT_DECAY).sub_(direction * (self.rate * scale))


def rate_at(
    progress: float, step: int, *, peak: float, warmup: int, decay_from: float, least: float
) -> float:
    """Warm-up by steps, constant, then linear to `least` of the peak at the end of the run (`progress` 1)."""
    rise = min(1.0, (step + 1) / warmup)
    fall = (
        1.0
        if progress < decay_from
        else 1.0 - (1.0 - least) * (progress - decay_from) / (1.0 - decay_from)
    )
    return peak * rise * max(fall, least)
