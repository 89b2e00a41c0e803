"""The tensors a DeepSeek-V4.1 checkpoint must hold: name, shape and storage type, from the configuration.

Names and rules: weights.md section 3. With the released configuration the table has 96,085 tensors and
510,286,023,000 bytes. No torch here.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsserve.config.model import ModelConfig

#: Inputs that share one scale in an FP4 row and in an Engram row (weights.md section 2).
ROW_BLOCK = 32
_SKIP_VISION = "vision: images are not served"
_SKIP_BIAS_VL = "router bias of image tokens: images are not served"
_SKIP_DRAFT = "DSpark: speculative decoding is off"
_SKIP_TABLE = "Engram tables: loaded by their placement"
_SKIP_DRAFT_BIAS_VL = "never used: drafts are text"


class StorageType(enum.Enum):
    """How the elements of a tensor lie in the file; the value is the name used in messages."""

    BF16 = "BF16"
    F32 = "F32"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    #: Two E2M1 codes a byte; the file may call the bytes I8 or U8, or the codes F4.
    FP4 = "I8 (packed FP4)"

    @property
    def file_types(self) -> tuple[str, ...]:
        """Names in a safetensors header that mean this type."""
        return ("I8", "U8", "F4") if self is StorageType.FP4 else (self.value,)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of `TensorSpec.shape`."""
        return {StorageType.BF16: 2, StorageType.F32: 4}.get(self, 1)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One expected tensor.

    Attributes:
        shape: Shape in memory; for packed FP4 the last dimension counts bytes.
        dtype: Storage type in the file.
        skip_reason: Why the tensor is checked but not loaded; None for one that is loaded.
        other_shape: A second spelling of the shape with the same bytes that files may use.
    """

    shape: tuple[int, ...]
    dtype: StorageType
    skip_reason: str | None = None
    other_shape: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.element_bytes

    def file_shapes(self, file_type: str) -> tuple[tuple[int, ...], ...]:
        """Shapes that a header may give for this tensor under the type name `file_type`."""
        if file_type == "F4":  # counts codes, not bytes
            return ((*self.shape[:-1], 2 * self.shape[-1]),)
        return (self.shape,) if self.other_shape is None else (self.shape, self.other_shape)


Named = tuple[str, TensorSpec]


def expected_tensors(
    config: ModelConfig,
    *,
    vision: bool = False,
    draft: bool = False,
    engram_tables: bool = True,
) -> dict[str, TensorSpec]:
    """Return every tensor that a checkpoint of `config` must hold, in the order of the model.

    Args:
        config: The model; every size comes from it.
        vision: Whether images are served; else `vision.*`, `aligner.*`, `image_*` and the router's
            `bias_vl` are marked as skipped.
        draft: Whether DSpark runs; else `mtp.*` is marked as skipped.
        engram_tables: Whether the Engram tables are loaded with the other weights; else they are marked as skipped.
    """
    specs: dict[str, TensorSpec] = dict(_top(config))
    for layer in range(config.num_hidden_layers):
        specs.update(_layer(config, layer, vision=vision))
    if not engram_tables:
        for layer in config.engram_layer_ids:
            for leaf in ("weight", "scale"):
                name = f"layers.{layer}.engram.embed.{leaf}"
                specs[name] = _skipped(specs[name], _SKIP_TABLE)
    skip_draft = None if draft else _SKIP_DRAFT
    for name, spec in _draft(config):
        specs[name] = _skipped(spec, skip_draft or spec.skip_reason)
    for name, spec in _vision(config):
        specs[name] = _skipped(spec, None if vision else _SKIP_VISION)
    return specs


def _top(config: ModelConfig) -> Iterator[Named]:
    yield "embed.weight", _bf16(config.vocab_size, config.hidden_size)
    yield "head.weight", _bf16(config.vocab_size, config.hidden_size)
    yield "norm.weight", _bf16(config.hidden_size)


def _layer(config: ModelConfig, layer: int, *, vision: bool) -> Iterator[Named]:
    prefix = f"layers.{layer}."
    bias_vl_reason = None if vision else _SKIP_BIAS_VL
    yield from _block(prefix, config, num_experts=config.n_routed_experts, skip_vl=bias_vl_reason)
    if layer in config.kv_source_layer_ids:
        yield from _compressor(f"{prefix}attn.", config, ratio=config.compress_ratios[layer])
    if layer in config.index_source_layer_ids:
        index_heads = config.index_n_heads
        yield from _fp8(
            f"{prefix}attn.indexer.wq_b",
            config,
            rows=index_heads * config.index_head_dim,
            columns=config.q_lora_rank,
        )
        weights_proj = _bf16(index_heads, config.hidden_size)
        yield f"{prefix}attn.indexer.weights_proj.weight", weights_proj
    if layer in config.engram_layer_ids:
        table_rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        yield from _engram(f"{prefix}engram.", config, table_rows=table_rows)


def _block(
    prefix: str, config: ModelConfig, *, num_experts: int, skip_vl: str | None
) -> Iterator[Named]:
    """Yield what backbone layers and DSpark stages have in common."""
    hidden = config.hidden_size
    for name in ("attn_norm", "ffn_norm"):
        yield f"{prefix}{name}.weight", _bf16(hidden)
    mixes = config.hc_mult * (config.hc_mult + 2)
    for name in ("hc_attn", "hc_ffn"):
        yield f"{prefix}{name}_fn", _f32(mixes, config.hc_mult * hidden)
        yield f"{prefix}{name}_base", _f32(mixes)
        yield f"{prefix}{name}_scale", _f32(3)
    yield from _attention(f"{prefix}attn.", config)
    yield f"{prefix}ffn.gate.weight", _bf16(num_experts, hidden)
    yield f"{prefix}ffn.gate.bias", _f32(num_experts)
    yield f"{prefix}ffn.gate.bias_vl", _skipped(_f32(num_experts), skip_vl)
    inner = config.moe_intermediate_size
    for name, rows, columns in (
        ("w1", inner, hidden),
        ("w2", hidden, inner),
        ("w3", inner, hidden),
    ):
        yield from _fp8(f"{prefix}ffn.shared_experts.{name}", config, rows=rows, columns=columns)
    for expert in range(num_experts):
        for name, rows, columns in (
            ("w1", inner, hidden),
            ("w2", hidden, inner),
            ("w3", inner, hidden),
        ):
            yield from _fp4(f"{prefix}ffn.experts.{expert}.{name}", rows=rows, columns=columns)


def _attention(prefix: str, config: ModelConfig) -> Iterator[Named]:
    hidden, rank, heads = config.hidden_size, config.q_lora_rank, config.num_attention_heads
    groups, head_dim = config.o_groups, config.head_dim
    yield from _fp8(f"{prefix}wq_a", config, rows=rank, columns=hidden)
    yield f"{prefix}q_norm.weight", _bf16(rank)
    yield from _fp8(f"{prefix}wq_b", config, rows=heads * head_dim, columns=rank)
    yield from _fp8(f"{prefix}wkv", config, rows=head_dim, columns=hidden)
    yield f"{prefix}kv_norm.weight", _bf16(head_dim)
    yield f"{prefix}attn_sink", _f32(heads)
    group_rows = groups * config.o_lora_rank
    yield from _fp8(f"{prefix}wo_a", config, rows=group_rows, columns=heads * head_dim // groups)
    yield from _fp8(f"{prefix}wo_b", config, rows=hidden, columns=group_rows)


def _compressor(prefix: str, config: ModelConfig, *, ratio: int) -> Iterator[Named]:
    """Yield the compressor of a KV source and the index key projection that belongs to it."""
    head_dim = config.head_dim
    yield f"{prefix}compressor.wkv.weight", _bf16(head_dim, config.hidden_size)
    if ratio > 1:
        yield f"{prefix}compressor.wgate.weight", _bf16(head_dim, config.hidden_size)
    yield f"{prefix}compressor.norm.weight", _bf16(head_dim)
    yield f"{prefix}indexer.wk.weight", _bf16(config.index_head_dim, head_dim)
    yield f"{prefix}indexer.k_norm.weight", _bf16(config.index_head_dim)


def _engram(prefix: str, config: ModelConfig, *, table_rows: int) -> Iterator[Named]:
    width, streams, hidden = config.engram_head_dim, config.hc_mult, config.hidden_size
    yield f"{prefix}embed.weight", TensorSpec((table_rows, width), StorageType.F8_E4M3)
    scale_columns = math.ceil(width / ROW_BLOCK)
    yield f"{prefix}embed.scale", TensorSpec((table_rows, scale_columns), StorageType.F8_E8M0)
    gathered = (config.engram_max_ngram_size - 1) * config.engram_n_heads * width
    yield from _fp8(f"{prefix}wkv", config, rows=(streams + 1) * hidden, columns=gathered)
    for name in ("q_weight", "k_weight"):
        yield f"{prefix}{name}", _bf16(streams, hidden)


def _draft(config: ModelConfig) -> Iterator[Named]:
    """Yield the DSpark stages; the first also holds the tap projection, the last the heads."""
    stages, hidden, rank = (
        config.num_nextn_predict_layers,
        config.hidden_size,
        config.dspark_markov_rank,
    )
    for stage in range(stages):
        yield from _block(
            f"mtp.{stage}.",
            config,
            num_experts=config.dspark_n_routed_experts,
            skip_vl=_SKIP_DRAFT_BIAS_VL,
        )
    if stages:
        taps = len(config.dspark_target_layer_ids)
        yield from _fp8("mtp.0.main_proj", config, rows=hidden, columns=taps * hidden)
        yield "mtp.0.main_norm.weight", _bf16(hidden)
        last = f"mtp.{stages - 1}."
        yield f"{last}norm.weight", _bf16(hidden)
        yield f"{last}markov_head.embed.weight", _bf16(config.vocab_size, rank)
        yield f"{last}markov_head.head.weight", _bf16(config.vocab_size, rank)
        yield f"{last}confidence_head.proj.weight", _bf16(1, hidden + rank)


def _vision(config: ModelConfig) -> Iterator[Named]:
    vision = config.vision
    if vision is None:
        return
    width, patch, inner, hidden = (
        vision.hidden_size,
        vision.patch_size,
        vision.intermediate_size,
        config.hidden_size,
    )
    yield (
        "vision.patch_embed.proj.weight",
        TensorSpec(
            (width, 3 * patch * patch), StorageType.BF16, other_shape=(width, 3, patch, patch)
        ),
    )
    yield "vision.patch_embed.proj.bias", _bf16(width)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        yield f"{prefix}norm1.weight", _bf16(width)
        yield f"{prefix}norm2.weight", _bf16(width)
        yield from _biased(f"{prefix}attn.wqkv", rows=3 * width, columns=width)
        yield from _biased(f"{prefix}attn.wo", rows=width, columns=width)
        yield f"{prefix}mlp.w1.weight", _bf16(2 * inner, width)
        yield f"{prefix}mlp.w2.weight", _bf16(width, inner)
    yield "vision.norm.weight", _bf16(width)
    yield from _biased("aligner.w1", rows=hidden, columns=width * vision.downsample_ratio**2)
    yield from _biased("aligner.w2", rows=hidden, columns=hidden)
    for name in ("image_start", "image_end", "image_newline"):
        yield name, _bf16(hidden)


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, StorageType.BF16)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, StorageType.F32)


def _fp8(name: str, config: ModelConfig, *, rows: int, columns: int) -> Iterator[Named]:
    block_rows, block_columns = config.weight_block_size
    scale = (math.ceil(rows / block_rows), math.ceil(columns / block_columns))
    yield f"{name}.weight", TensorSpec((rows, columns), StorageType.F8_E4M3)
    yield f"{name}.scale", TensorSpec(scale, StorageType.F8_E8M0)


def _fp4(name: str, *, rows: int, columns: int) -> Iterator[Named]:
    yield f"{name}.weight", TensorSpec((rows, columns // 2), StorageType.FP4)
    yield f"{name}.scale", TensorSpec((rows, columns // ROW_BLOCK), StorageType.F8_E8M0)


def _biased(name: str, *, rows: int, columns: int) -> Iterator[Named]:
    yield f"{name}.weight", _bf16(rows, columns)
    yield f"{name}.bias", _bf16(rows)


def _skipped(spec: TensorSpec, reason: str | None) -> TensorSpec:
    return TensorSpec(spec.shape, spec.dtype, reason, spec.other_shape)
