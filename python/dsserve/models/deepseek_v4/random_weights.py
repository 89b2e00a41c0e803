"""Random weights in storage form, at a scale under which activations stay finite and logits have spread.

Used by `--load-format dummy` and by `dsserve debug make-tiny`. Scales: tiny-model.md section 6.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from dsserve.models.deepseek_v4.tensors import ROW_BLOCK, StorageType
from dsserve.models.deepseek_v4.weight_codes import encode_fp4, encode_fp8

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dsserve.config.model import ModelConfig
    from dsserve.models.deepseek_v4.tensors import TensorSpec

#: Standard deviation of the logits (that of the golden checkpoints).
_LOGIT_SCALE = 4.0
#: Projections that write into the residual streams are smaller, so that the streams do not blow up.
_OUTPUT_SCALE = 0.4
_OUTPUT_MATRICES = ("attn.wo_b", "shared_experts.w2", "engram.wkv", "main_proj")
#: Diagonal of the stream-mixing matrix before its softmax: near identity.
_MIX_DIAGONAL = 3.0


def draw_weights(
    specs: Mapping[str, TensorSpec], config: ModelConfig, *, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of `specs`, a scale right after the codes it belongs to.

    Each tensor depends on (name, shape, seed) alone, so a subset draws the same values.

    Args:
        specs: Expected tensors; the scale of each quantised weight must be among them.
        config: The model they belong to.
        seed: Any integer.
    """
    for name, spec in specs.items():
        if spec.dtype is StorageType.F8_E8M0:
            continue
        if spec.dtype is StorageType.FP4:
            shape = (spec.shape[0], 2 * spec.shape[1])
            values = draw_values(name, shape, config, seed=seed)
            codes, scale = encode_fp4(values, block=ROW_BLOCK)
        elif spec.dtype is StorageType.F8_E4M3:
            values = draw_values(name, spec.shape, config, seed=seed)
            block_rows, block_columns = _fp8_block(name, config)
            codes, scale = encode_fp8(values, block_rows=block_rows, block_columns=block_columns)
        else:
            values = draw_values(name, spec.shape, config, seed=seed)
            yield name, values.to(torch.bfloat16) if spec.dtype is StorageType.BF16 else values
            continue
        yield name, codes
        yield f"{name.removesuffix('weight')}scale", scale


def draw_values(
    name: str, shape: tuple[int, ...], config: ModelConfig, *, seed: int
) -> torch.Tensor:
    """Return the float32 values of a tensor before rounding to its storage type."""
    generator = torch.Generator().manual_seed(_tensor_seed(name, seed))
    noise: torch.Tensor = torch.randn(shape, generator=generator)
    leaf = name.rsplit(".", 1)[-1]
    if leaf.startswith("hc_"):
        return _mixing(leaf, noise, config)
    if "norm" in name or leaf in ("q_weight", "k_weight"):
        return 1.0 + 0.1 * noise
    if name == "head.weight":
        return _head(noise, config)
    if leaf in ("bias", "bias_vl"):
        return 0.05 * noise
    if len(shape) == 1 or name.endswith("embed.weight"):
        return 0.5 * noise
    scale = 1.0 / math.sqrt(shape[1])
    is_output = any(part in name for part in _OUTPUT_MATRICES) or name.endswith(".w2.weight")
    return noise * (scale * _OUTPUT_SCALE if is_output else scale)


def _mixing(leaf: str, noise: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Return mHC parameters: streams mix a little, and their gates differ (model.md section 4)."""
    if leaf.endswith("_fn"):
        return 0.02 * noise
    if leaf.endswith("_scale"):
        return torch.full_like(noise, 0.3)
    streams = config.hc_mult
    diagonal = _MIX_DIAGONAL * torch.eye(streams).flatten()
    return torch.cat((0.5 * noise[: 2 * streams], diagonal + 0.1 * noise[2 * streams :]))


def _head(noise: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Return the LM head; control tokens get logit 0, which greedy decoding does not reach."""
    head = noise * (_LOGIT_SCALE / math.sqrt(config.hidden_size))
    control = {config.bos_token_id, config.pad_token_id, config.image_token_id}
    control |= {config.dspark_noise_token_id, *config.eos_token_ids}
    head[sorted(control)] = 0.0
    return head


def _fp8_block(name: str, config: ModelConfig) -> tuple[int, int]:
    return (1, ROW_BLOCK) if name.endswith("engram.embed.weight") else config.weight_block_size


def _tensor_seed(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
