"""Fills in the settings that depend on the model, and checks the others against it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from dsserve.config.determinism import make_deterministic
from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig
    from dsserve.config.server import ServerConfig

#: Page size of V4.1 models whose window is not smaller.
DEFAULT_PAGE_SIZE = 128
#: Rows of one prefill step on the CPU.
DEFAULT_CPU_CHUNK = 1024
#: Memory of the KV pool on the CPU unless a flag says otherwise.
DEFAULT_CPU_POOL_BYTES = 1024**3

_PARSER_NAMES = ("auto", "deepseek-v41", "deepseekv41")


def resolve(config: ServerConfig, model: ModelConfig) -> ServerConfig:
    """Return `config` with every automatic value decided.

    Decided are: tokenizer path, served model name, context length, page size, chunk size, device, Engram
    placement, both replays, the speculative algorithm and the parsers. `model_path` must be set already.

    Raises:
        ConfigError: If a value does not go with the model, naming the flag and the remedy.
    """
    config = make_deterministic(config)
    if config.model_path is None:
        raise ConfigError("--model-path is not set", param="--model-path")
    page_size = config.page_size if config.page_size is not None else default_page_size(model)
    algorithm = _speculative_algorithm(config, model)
    resolved = config.replace(
        tokenizer_path=config.tokenizer_path or config.model_path,
        served_model_name=config.served_model_name or _last_part(config.model_path),
        context_length=config.context_length or model.max_position_embeddings,
        page_size=page_size,
        chunked_prefill_size=config.chunked_prefill_size or _default_chunk(model, page_size),
        device="cpu" if config.device == "auto" else config.device,
        engram_placement="device" if config.engram_placement == "auto" else config.engram_placement,
        enable_encoder_swa_bounded_replay=config.enable_encoder_swa_bounded_replay is not False,
        enable_decoder_swa_bounded_replay=config.enable_decoder_swa_bounded_replay is not False,
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=_num_draft_tokens(config, model, algorithm),
        reasoning_parser=_parser("--reasoning-parser", config.reasoning_parser, "deepseek-v41"),
        tool_call_parser=_parser("--tool-call-parser", config.tool_call_parser, "deepseekv41"),
    )
    _check(resolved, model)
    return resolved


def default_page_size(model: ModelConfig) -> int:
    """Return 128, or the largest power of two within the window where that is smaller."""
    if model.sliding_window >= DEFAULT_PAGE_SIZE:
        return DEFAULT_PAGE_SIZE
    return max(model.stateful_ratio, 1 << (model.sliding_window.bit_length() - 1))


def _check(config: ServerConfig, model: ModelConfig) -> None:
    page, chunk = config.page_size or 0, config.chunked_prefill_size or 0
    if page % model.stateful_ratio:
        raise ConfigError(
            f"--page-size {page}: must be a multiple of {model.stateful_ratio}, the compression ratio of "
            "the model",
            param="--page-size",
        )
    has_replay = bool(config.enable_encoder_swa_bounded_replay)
    least = model.sliding_window + page if has_replay else page
    if 0 < chunk < least:
        reason = (
            f"encoder replay needs a window ({model.sliding_window}) and a page ({page})"
            if has_replay
            else "a chunk holds at least a page"
        )
        raise ConfigError(
            f"--chunked-prefill-size {chunk}: must be at least {least}, because {reason}; raise it or lower "
            "--page-size",
            param="--chunked-prefill-size",
        )
    context = config.context_length or 0
    if context > model.max_position_embeddings:
        raise ConfigError(
            f"--context-length {context}: the model has positions up to {model.max_position_embeddings}; "
            "lower it",
            param="--context-length",
        )
    _check_engram(config, model)
    tokens = config.max_total_tokens
    if tokens is not None and tokens < page:
        raise ConfigError(
            f"--max-total-tokens {tokens}: holds no page of {page} tokens; raise it or lower --page-size",
            param="--max-total-tokens",
        )


def _check_engram(config: ServerConfig, model: ModelConfig) -> None:
    placement = config.engram_placement
    if placement == "device":
        if config.engram_cache_size:
            raise ConfigError(
                f"--engram-cache-size {config.engram_cache_size}: with --engram-placement device every row is on the "
                "device; leave the cache off, or use host or sharded",
                param="--engram-cache-size",
            )
    elif not model.engram_layer_ids:
        raise ConfigError(
            f"--engram-placement {placement}: the model has no Engram tables; leave the flag out",
            param="--engram-placement",
        )
    elif config.device != "cpu":
        raise ConfigError(
            f"--engram-placement {placement}: does not work yet with --device {config.device}; use device",
            param="--engram-placement",
        )


def _speculative_algorithm(config: ServerConfig, model: ModelConfig) -> str:
    """`none` or `DSPARK`; the fake model drafts where its settings say how."""
    wanted = config.speculative_algorithm
    is_fake = config.load_format == "fake"
    has_draft = "draft_accept" in model.fake if is_fake else model.has_draft
    if wanted == "DSPARK" and not has_draft:
        remedy = (
            "give the fake model draft_accept"
            if is_fake
            else "the checkpoint has no DSpark head (num_nextn_predict_layers is 0); use none"
        )
        raise ConfigError(
            f"--speculative-algorithm DSPARK: {remedy}", param="--speculative-algorithm"
        )
    return "DSPARK" if has_draft and wanted in ("DSPARK", "auto") else "none"


def _num_draft_tokens(config: ServerConfig, model: ModelConfig, algorithm: str) -> int | None:
    """Draft tokens of a step with the anchor, or None without drafts."""
    wanted, most = config.speculative_num_draft_tokens, model.dspark_block_size + 1
    if algorithm == "none":
        _refuse_settings_of_drafts(config)
        return None
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"--speculative-num-draft-tokens {wanted}: the checkpoint drafts blocks of "
            f"{most - 1} tokens, with the anchor {most}; use at most {most}",
            param="--speculative-num-draft-tokens",
        )
    if config.speculative_use_block_verification and (
        config.speculative_dspark_sampling == "shared-noise"
    ):
        raise ConfigError(
            "--speculative-use-block-verification: goes with --speculative-dspark-sampling rejection "
            "or greedy-draft; name one of them",
            param="--speculative-use-block-verification",
        )
    if config.speculative_dspark_cost_table and config.speculative_dspark_verify == "static":
        raise ConfigError(
            "--speculative-dspark-cost-table: static verification looks at no costs; "
            "add --speculative-dspark-verify cap or compact, or leave it out",
            param="--speculative-dspark-cost-table",
        )
    return most if wanted is None else wanted


def _refuse_settings_of_drafts(config: ServerConfig) -> None:
    """Without drafts a flag about them would be ignored."""
    settings = [field for field in fields(config) if field.name.startswith("speculative_")]
    for field in settings:
        value = getattr(config, field.name)
        if field.name != "speculative_algorithm" and value != field.default:
            flag = "--" + field.name.replace("_", "-")
            shown = flag if value is True else f"{flag} {value}"
            raise ConfigError(
                f"{shown}: there are no drafts with --speculative-algorithm {config.speculative_algorithm} here; "
                "leave the flag out, or give --speculative-algorithm DSPARK",
                param=flag,
            )


def _default_chunk(model: ModelConfig, page_size: int) -> int:
    return max(DEFAULT_CPU_CHUNK, model.sliding_window + page_size)


def _last_part(path: str) -> str:
    return Path(path).resolve().name or path


def _parser(flag: str, value: str, name: str) -> str:
    if value not in _PARSER_NAMES:
        raise ConfigError(f"{flag} {value}: the model is a V4.1; use {name} or auto", param=flag)
    return name
