"""Relations between the fields of a model's configuration that the forward relies on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig


def check_model_config(config: ModelConfig, *, source: str = "config.json") -> None:
    """Check the relations between fields that the forward relies on.

    Raises:
        ConfigError: Naming the field, its value and what is expected.
    """

    def require(condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise ConfigError(f"{source}: {name} = {getattr(config, name)!r}: {expected}")

    layers, ratios = config.num_hidden_layers, config.compress_ratios
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "sliding_window",
        "max_position_embeddings",
        "o_groups",
        "hc_mult",
        "num_experts_per_tok",
        "gate_temp",
    ):
        require(getattr(config, name) > 0, name, "must be positive")
    ids = (config.bos_token_id, config.pad_token_id, *config.eos_token_ids)
    if not all(0 <= token_id < config.vocab_size for token_id in ids):
        raise ConfigError(
            f"{source}: bos_token_id, pad_token_id or eos_token_id is no id below vocab_size = {config.vocab_size}: "
            f"{', '.join(map(str, ids))}"
        )
    require(
        len(ratios) >= layers, "compress_ratios", f"needs an entry for each of the {layers} layers"
    )
    require(
        all(ratio in (0, 1, 2) for ratio in ratios),
        "compress_ratios",
        "V4.1 has the ratios 0, 1 and 2",
    )
    sources = config.kv_source_layer_ids
    require(
        bool(sources) and tuple(sorted(set(sources))) == sources,
        "kv_source_layer_ids",
        "must be ascending",
    )
    require(
        all(0 <= i < layers for i in sources), "kv_source_layer_ids", f"must lie in 0..{layers - 1}"
    )
    require(
        set(sources) <= set(config.index_source_layer_ids),
        "index_source_layer_ids",
        "must contain every KV source",
    )
    last = config.last_kv_source_layer_id
    require(
        config.candidate_source_layer_id == last,
        "candidate_source_layer_id",
        f"must be the last KV source {last}",
    )
    require(
        all(r <= 1 for r in ratios[last:layers]),
        "compress_ratios",
        "ratio 2 cannot follow the last KV source",
    )
    for layer in range(layers):
        ratio = ratios[layer]
        if ratio and (layer < sources[0] or ratios[config.kv_source_of(layer)] != ratio):
            raise ConfigError(
                f"{source}: compress_ratios[{layer}] = {ratio} has no KV source of that ratio before it"
            )
    require(config.head_dim % 32 == 0, "head_dim", "must be a multiple of 32")
    require(config.hidden_size % 32 == 0, "hidden_size", "must be a multiple of 32")
    require(
        config.qk_rope_head_dim <= min(config.head_dim, config.index_head_dim),
        "qk_rope_head_dim",
        "too large",
    )
    require(config.num_attention_heads % config.o_groups == 0, "o_groups", "must divide the heads")
    require(
        config.num_experts_per_tok <= config.n_routed_experts,
        "num_experts_per_tok",
        "more than the experts",
    )
    require(
        len(config.engram_layer_ids) == len(config.engram_num_embeddings),
        "engram_num_embeddings",
        "needs one entry for each Engram layer",
    )
    require(
        all(i < last for i in config.engram_layer_ids),
        "engram_layer_ids",
        f"must lie before layer {last}",
    )
    taps = config.dspark_target_layer_ids
    require(
        not config.has_draft or (bool(taps) and tuple(sorted(set(taps))) == taps),
        "dspark_target_layer_ids",
        "must be ascending",
    )
    require(
        not config.has_draft or all(0 <= i < layers for i in taps),
        "dspark_target_layer_ids",
        f"must lie in 0..{layers - 1}",
    )
    require(
        not config.has_draft or config.dspark_block_size > 0,
        "dspark_block_size",
        "must be positive",
    )
    require(config.n_shared_experts == 1, "n_shared_experts", "only one shared expert is supported")
