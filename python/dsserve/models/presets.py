"""Ready configurations in the released `config.json` form: tiny models for tests, the released one for tables.

Values: model.md section 1 (`released`), tiny-model.md section 2 (`tiny`), golden checkpoints A and G.
"""

from __future__ import annotations

import copy
from typing import Any

from dsserve.errors import ConfigError

_RELEASED_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
}
_RELEASED_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "hidden_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}
_TINY: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "index_n_heads": 4,
    "index_topk": 64,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 32,
    "engram_layer_ids": [1, 2],
    "engram_num_embeddings": [6126, 6332],
    "engram_vocab_size": 1000,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 2,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_GOLDEN: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_GOLDEN_A: dict[str, Any] = {
    "num_hidden_layers": 12,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "swiglu_limit": 2.5,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 16,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 4,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [2914, 3746],
    "engram_vocab_size": 211,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "dspark_target_layer_ids": [9, 10, 11],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
}
_GOLDEN_G: dict[str, Any] = {
    "num_hidden_layers": 5,
    "max_position_embeddings": 768,
    "compress_ratios": [0, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 4],
    "index_topk": 64,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 16,
    "engram_layer_ids": [0, 1],
    "engram_num_embeddings": [1916, 2148],
    "engram_vocab_size": 307,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [2, 3, 4],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
}
_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "golden-a": _GOLDEN | _GOLDEN_A,
    "golden-g": _GOLDEN | _GOLDEN_G,
}
#: Presets that `dsserve debug make-tiny` can write.
PRESET_NAMES = tuple(_PRESETS)


def preset_config(
    name: str, *, image_token_id: int, noise_token_id: int, compressed_vocab_size: int
) -> dict[str, Any]:
    """Return the `config.json` of a tiny model with the ids of its tokenizer.

    Args:
        name: One of `PRESET_NAMES`.
        image_token_id: Id of the image token.
        noise_token_id: Id of DSpark's noise token.
        compressed_vocab_size: Keys of the Engram vocabulary map of the tokenizer.

    Raises:
        ConfigError: If there is no such preset.
    """
    text = copy.deepcopy(_RELEASED_TEXT | _preset(name))
    text["dspark_noise_token_id"] = noise_token_id
    text["engram_compressed_vocab_size"] = compressed_vocab_size
    return _top_level(text, image_token_id)


def preset_vocab_size(name: str) -> int:
    """Return the vocabulary size of a preset: what its tokenizer must have.

    Raises:
        ConfigError: If there is no such preset.
    """
    return int(_preset(name)["vocab_size"])


def released_config() -> dict[str, Any]:
    """Return the `config.json` of DeepSeek-V4.1-Flash: for tables and sizes, far too large to make."""
    config = _top_level(copy.deepcopy(_RELEASED_TEXT), image_token_id=129264)
    return config | {"vision_config": dict(_RELEASED_VISION)}


def _preset(name: str) -> dict[str, Any]:
    try:
        return _PRESETS[name]
    except KeyError:
        raise ConfigError(
            f"--preset {name!r} does not exist; choose one of {', '.join(PRESET_NAMES)}",
            param="preset",
        ) from None


def _top_level(text: dict[str, Any], image_token_id: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token_id,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
