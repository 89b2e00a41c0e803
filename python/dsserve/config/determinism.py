"""What `--enable-deterministic-inference` decides and refuses: the same output whatever else runs or ran before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsserve.config.server import ServerConfig

_FLAG = "--enable-deterministic-inference"
#: Seed of requests that bring none, unless `--random-seed` names one.
DEFAULT_SEED = 0


def make_deterministic(config: ServerConfig) -> ServerConfig:
    """Return `config` with both bounded replays off if the flag is on, as they make results depend on hits.

    Without encoder replay a hit would have no window, so the prefix cache gives none: every prompt, and what a retracted
    request had, is computed again, all rows through all layers.

    Raises:
        ConfigError: Listing every setting that the flag does not go with.
    """
    if not config.enable_deterministic_inference:
        return config
    obstacles = list(_obstacles(config))
    if obstacles:
        raise ConfigError(f"{_FLAG} does not go with {'; nor with '.join(obstacles)}", param=_FLAG)
    return config.replace(
        enable_encoder_swa_bounded_replay=False, enable_decoder_swa_bounded_replay=False
    )


def default_seed(config: ServerConfig) -> int | None:
    """Seed of requests that bring none; None = a new one for each."""
    if not config.enable_deterministic_inference:
        return None
    return DEFAULT_SEED if config.random_seed is None else config.random_seed


def _obstacles(config: ServerConfig) -> Iterator[str]:
    for name in ("encoder", "decoder"):
        if getattr(config, f"enable_{name}_swa_bounded_replay"):
            yield f"--enable-{name}-swa-bounded-replay (results would depend on cached prefixes and chunks)"
    if config.device not in ("auto", "cpu"):
        yield f"--device {config.device} (its operators give a row other bits in another batch)"
    if config.speculative_dspark_sampling != "shared-noise":
        yield (
            f"--speculative-dspark-sampling {config.speculative_dspark_sampling} (what is drawn depends on the drafts; "
            "use shared-noise)"
        )
