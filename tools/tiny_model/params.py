"""Trainable tensors, stacked over layers: names and shapes follow from the checkpoint's tensor table.

A group stacks the same tensor of all layers (of all experts too). Masters are float32; the forward sees `cooked`
copies, rounded to what the checkpoint can hold, and gradients are taken at those (straight through).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tools.tiny_model.quantise import weight_fp4, weight_fp8, weight_rows_fp8
from torch import Tensor

from dsserve.models.deepseek_v4.random_weights import draw_values
from dsserve.models.deepseek_v4.tensors import StorageType, expected_tensors
from dsserve.models.deepseek_v4.weight_codes import decode_fp4, decode_fp8

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dsserve.config.model import ModelConfig


@dataclass(slots=True)
class Group:
    """One stacked tensor.

    Attributes:
        key: Checkpoint name with `*` for layer and expert numbers.
        kind: Storage type.
        members: Checkpoint names in stacking order.
        shape: Shape of one member, unpacked.
    """

    key: str
    kind: StorageType
    members: list[str] = field(default_factory=list)
    shape: tuple[int, ...] = ()

    @property
    def is_table(self) -> bool:
        """Whether it is an Engram table (row-wise scales, sparse use)."""
        return "engram.embed" in self.key

    @property
    def is_draft(self) -> bool:
        """Whether it belongs to the DSpark head."""
        return self.key.startswith("mtp.")


def build_groups(config: ModelConfig, *, draft: bool) -> list[Group]:
    """All groups of the target, or those of the draft head."""
    groups: dict[str, Group] = {}
    for name, spec in expected_tensors(config, draft=True).items():
        if name.endswith((".scale", "bias_vl")) or name.startswith("mtp.") != draft:
            continue
        key = (
            name
            if "engram.embed" in name
            else re.sub(r"\.\d+\.", ".*.", re.sub(r"^(layers|mtp)\.\d+\.", r"\1.*.", name))
        )
        group = groups.setdefault(key, Group(key, spec.dtype))
        group.members.append(name)
        packed = spec.dtype is StorageType.FP4
        group.shape = (*spec.shape[:-1], spec.shape[-1] * 2) if packed else spec.shape
    return list(groups.values())


def cook(group: Group, master: Tensor) -> Tensor:
    """What the checkpoint will hold of a master, as numbers: BF16 for matrices, else float32."""
    if group.kind is StorageType.F32:
        return master.clone()
    if group.kind is StorageType.FP4:
        return weight_fp4(master).to(torch.bfloat16)
    if group.kind is StorageType.F8_E4M3:
        rounded = weight_rows_fp8(master) if group.is_table else weight_fp8(master)
        return rounded.to(torch.bfloat16)
    rounded = master.to(torch.bfloat16)
    return (
        rounded
        if len(group.shape) > 1 and not group.key.endswith(("q_weight", "k_weight"))
        else rounded.float()
    )


def init_masters(groups: list[Group], config: ModelConfig, *, seed: int) -> dict[str, Tensor]:
    """Initial float32 masters (tiny-model.md section 6)."""
    masters = {}
    for group in groups:
        values = torch.stack(
            [draw_values(name, group.shape, config, seed=seed) for name in group.members]
        )
        if group.key == "head.weight":
            values = 0.02 * torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
        if group.key.endswith("norm.weight") or group.key.endswith(("q_weight", "k_weight")):
            values = torch.ones_like(values)
        if group.key.endswith(("gate.bias", "attn_sink")):
            values = torch.zeros_like(values)
        if "confidence_head" in group.key:
            values = values * 0.1
        masters[group.key] = values
    return masters


def masters_from_checkpoint(
    groups: list[Group], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Masters with exactly the values of a loaded checkpoint."""

    def value(name: str, kind: StorageType) -> Tensor:
        tensor = tensors[name]
        if kind in (StorageType.BF16, StorageType.F32):
            return tensor.float()
        scale = tensors[f"{name.removesuffix('weight')}scale"]
        return decode_fp4(tensor, scale) if kind is StorageType.FP4 else decode_fp8(tensor, scale)

    return {g.key: torch.stack([value(name, g.kind) for name in g.members]) for g in groups}


class Weights:
    """Cooked tensors by checkpoint name; experts of a layer come stacked under the name without their number."""

    def __init__(
        self, groups: list[Group], cooked: Mapping[str, Tensor], convert: Callable[[Tensor], Tensor]
    ) -> None:
        """`convert` is applied to every stacked tensor (a cast in tests, else the identity)."""
        self._tensors: dict[str, Tensor] = {}
        for group in groups:
            stacked = convert(cooked[group.key])
            if ".experts." in group.key and "shared" not in group.key:
                layers = list(
                    dict.fromkeys(
                        re.sub(r"experts\.\d+\.", "experts.", name) for name in group.members
                    )
                )
                parts = stacked.unflatten(0, (len(layers), -1)).unbind(0)
                self._tensors.update(zip(layers, parts, strict=True))
            else:
                self._tensors.update(zip(group.members, stacked.unbind(0), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None if the layer has none."""
        return self._tensors.get(name)
