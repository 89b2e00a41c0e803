"""The model configuration: the released nested `config.json`, read and checked once.

Field names are those of `text_config` (model.md section 1). Every size used by the engine comes from here.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsserve.config.model_checks import check_model_config
from dsserve.errors import ConfigError

#: `architectures` entries this engine can run.
SUPPORTED_ARCHITECTURES = ("DeepseekV41ForCausalLM",)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower (model.md 1.3); read for the tensor table, not yet run."""

    hidden_size: int = 1024
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    downsample_ratio: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the compressed layers (model.md section 2)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A DeepSeek-V4.1 text model (model.md section 1.2)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_compressed_vocab_size: int
    engram_pad_token_id: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    image_token_id: int
    gate_temp: float = 1.0
    expert_dtype: str = "fp4"
    weight_block_size: tuple[int, int] = (32, 32)
    vision: VisionConfig | None = None
    #: Settings of the fake model (`--json-model-override-args '{"fake": {..}}'`).
    fake: dict[str, Any] = field(default_factory=dict)

    @property
    def last_kv_source_layer_id(self) -> int:
        """First layer of the decoder half: bounded replay cuts inside it (replay.md section 1)."""
        return self.kv_source_layer_ids[-1]

    @property
    def has_draft(self) -> bool:
        """Whether the checkpoint holds a DSpark head."""
        return self.num_nextn_predict_layers > 0

    @property
    def stateful_ratio(self) -> int:
        """Largest compression ratio that carries state between tokens (2 for V4.1)."""
        return max((self.compress_ratios[i] for i in self.kv_source_layer_ids), default=1)

    def kv_source_of(self, layer: int) -> int:
        """The layer whose compressed rows `layer` reads (model.md 1.4)."""
        return max(i for i in self.kv_source_layer_ids if i <= layer)

    def index_source_of(self, layer: int) -> int:
        """The layer whose top-k list `layer` reads (model.md 1.4)."""
        return max(i for i in self.index_source_layer_ids if i <= layer)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, checked again."""
        changed = dataclasses.replace(self, **changes)
        check_model_config(changed)
        return changed


def load_model_config(path: str | Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Read `config.json` of a checkpoint directory.

    Args:
        path: Checkpoint directory (or the file itself).
        overrides: `--json-model-override-args`: keys of `text_config`, or of the top level.

    Raises:
        ConfigError: If the file is missing, is no JSON, lacks a field or holds an impossible value;
            the message names the file and the field.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"no config.json in {file.parent}: --model-path must name a checkpoint directory"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    return model_config_from_dict(raw, overrides, source=str(file))


def model_config_from_dict(
    raw: Any, overrides: dict[str, Any] | None = None, *, source: str = "config.json"
) -> ModelConfig:
    """Build the configuration from parsed JSON; see `load_model_config`."""
    if not isinstance(raw, dict) or not isinstance(raw.get("text_config"), dict):
        raise ConfigError(
            f"{source}: expected an object with a nested text_config (the released V4.1 format)"
        )
    top = dict(raw)
    text = dict(raw["text_config"])
    fake: dict[str, Any] = {}
    for key, value in (overrides or {}).items():
        if key == "fake":
            if not isinstance(value, dict):
                raise ConfigError(f"{source}: fake must be an object, not {value!r}")
            fake = dict(value)
            if "window" in fake:
                text["sliding_window"] = fake["window"]
        elif key in text or key not in top:
            text[key] = value
        else:
            top[key] = value
    architectures = top.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(f"{source}: architectures must be a list, not {architectures!r}")
    known = [name for name in architectures if name in SUPPORTED_ARCHITECTURES]
    if not known:
        raise ConfigError(
            f"{source}: architectures {architectures} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    values = _text_values(text, source) | _top_values(top, source)
    try:
        config = ModelConfig(architecture=known[0], fake=fake, **values)
    except TypeError as error:
        raise ConfigError(f"{source}: {error}") from None
    check_model_config(config, source=source)
    return config


_TUPLES = (
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "engram_layer_ids",
    "engram_num_embeddings",
    "dspark_target_layer_ids",
)
_FLOATS = (
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
    "hc_eps",
    "rms_norm_eps",
)
_NOT_IN_TEXT = (
    "architecture",
    "rope_scaling",
    "bos_token_id",
    "eos_token_ids",
    "pad_token_id",
    "image_token_id",
    "gate_temp",
    "expert_dtype",
    "weight_block_size",
    "vision",
    "fake",
)
#: transformers 5 renamed two keys; both spellings are read.
_ALIASES = {"compress_ratios": "compress_rates", "rope_scaling": "rope_parameters"}


def _text_values(text: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of `text_config`, each checked for presence and type."""
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(ModelConfig):
        name = spec.name
        if name in _NOT_IN_TEXT:
            continue
        value = text.get(name, text.get(_ALIASES.get(name, name)))
        if value is None:
            raise ConfigError(f"{source}: text_config.{name} is missing")
        values[name] = _checked(name, value, source)
    scaling = text.get("rope_scaling", text.get("rope_parameters"))
    if not isinstance(scaling, dict):
        raise ConfigError(f"{source}: text_config.rope_scaling is missing")
    names = [spec.name for spec in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if not isinstance(scaling.get(name), int | float)]
    if missing:
        raise ConfigError(
            f"{source}: text_config.rope_scaling.{missing[0]} is missing or no number"
        )
    values["rope_scaling"] = RopeScaling(**{name: scaling[name] for name in names})
    gate_temp = text.get("gate_temp")
    values["gate_temp"] = 1.0 if gate_temp is None else _number(gate_temp, "gate_temp", source)
    return values


def _checked(name: str, value: Any, source: str) -> Any:
    if name in _TUPLES:
        if not isinstance(value, list | tuple) or not all(_is_int(item) for item in value):
            raise ConfigError(
                f"{source}: text_config.{name} must be a list of integers, not {value!r}"
            )
        return tuple(value)
    if name in _FLOATS:
        return _number(value, name, source)
    if not _is_int(value):
        raise ConfigError(f"{source}: text_config.{name} must be an integer, not {value!r}")
    return value


def _number(value: Any, name: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{source}: text_config.{name} must be a number, not {value!r}")
    return float(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _top_values(top: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of the top level and of `quantization_config`."""
    values: dict[str, Any] = {}
    for name in ("bos_token_id", "pad_token_id", "image_token_id"):
        if not _is_int(top.get(name)):
            raise ConfigError(f"{source}: {name} is missing or no integer")
        values[name] = top[name]
    eos = top.get("eos_token_id")
    values["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(_is_int(item) for item in values["eos_token_ids"]):
        raise ConfigError(f"{source}: eos_token_id is missing or no integer")
    quantization = top.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise ConfigError(f"{source}: quantization_config must be an object, not {quantization!r}")
    values["expert_dtype"] = quantization.get("expert_dtype", "fp4")
    values["weight_block_size"] = (32, 32)
    block = quantization.get("weight_block_size", [32, 32])
    if values["expert_dtype"] != "fp4" or block != [32, 32]:
        raise ConfigError(
            f"{source}: quantization_config {quantization} is not supported: expected expert_dtype fp4 and "
            "weight_block_size [32, 32]"
        )
    vision = top.get("vision_config")
    if isinstance(vision, dict):
        names = {spec.name for spec in dataclasses.fields(VisionConfig)}
        values["vision"] = VisionConfig(**{k: v for k, v in vision.items() if k in names})
    return values
