"""`dsserve debug make-tiny`: writes a random-weight checkpoint in the released format.

The same (preset, seed) gives the same files. The directory appears complete or not at all.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsserve.config.model import model_config_from_dict
from dsserve.debug.safetensors_writer import write_safetensors
from dsserve.debug.tokenizer_builder import (
    NOISE_TOKEN,
    build_tokenizer,
    image_token,
    token_id,
    tokenizer_settings,
)
from dsserve.engram.hashing import build_engram_constants, build_token_map
from dsserve.errors import ConfigError, DsserveError
from dsserve.models.deepseek_v4.checkpoint import INDEX_NAME, SINGLE_NAME
from dsserve.models.deepseek_v4.random_weights import draw_weights
from dsserve.models.deepseek_v4.tensors import expected_tensors
from dsserve.models.presets import PRESET_NAMES, preset_config, preset_vocab_size

if TYPE_CHECKING:
    from collections.abc import Sequence


logger = logging.getLogger(__name__)


def make_tiny(out: Path, *, seed: int = 0, preset: str = "tiny", force: bool = False) -> int:
    """Write a checkpoint to `out`.

    Args:
        out: New directory; its parents are made.
        seed: Seed of the weights.
        preset: One of `PRESET_NAMES`.
        force: Replace a directory that is not empty.

    Returns:
        Bytes of all tensors.

    Raises:
        ConfigError: If `out` exists and is not empty (without `force`), is a file, or cannot be written.
    """
    _check_target(out, force=force)
    temporary = out.parent / f".{out.name}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir(parents=True)
        num_bytes = _write_files(temporary, seed=seed, preset=preset)
        _put_in_place(temporary, out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}", param="out") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info("wrote %s: preset %s, seed %d, %.2f MB", out, preset, seed, num_bytes / 1e6)
    return num_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (2 for wrong arguments)."""
    parser = argparse.ArgumentParser(
        prog="dsserve debug make-tiny",
        description="Write a tiny random-weight checkpoint in the released format.",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--preset", choices=PRESET_NAMES, default="tiny", help="which model")
    parser.add_argument("--force", action="store_true", help="replace a directory with content")
    arguments = parser.parse_args(argv)
    try:
        num_bytes = make_tiny(
            arguments.out, seed=arguments.seed, preset=arguments.preset, force=arguments.force
        )
    except DsserveError as error:
        sys.stderr.write(f"dsserve debug make-tiny: {error}\n")
        return 2
    sys.stdout.write(f"{arguments.out}: {num_bytes} bytes of tensors\n")
    return 0


def _check_target(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a directory", param="out")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ConfigError(
            f"--out {out} is not empty; add --force to replace it or name another directory",
            param="out",
        )


def _put_in_place(temporary: Path, out: Path) -> None:
    """Rename `temporary` to `out`; what `out` held before is back if that fails."""
    if not out.exists():
        temporary.rename(out)
        return
    replaced = temporary.with_suffix(".old")
    out.rename(replaced)
    try:
        temporary.rename(out)
    except OSError:
        replaced.rename(out)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _write_files(folder: Path, *, seed: int, preset: str) -> int:
    vocab_size = preset_vocab_size(preset)
    tokenizer = build_tokenizer(vocab_size)
    token_map = build_token_map(tokenizer, vocab_size)
    raw = preset_config(
        preset,
        image_token_id=token_id(tokenizer, image_token()),
        noise_token_id=token_id(tokenizer, NOISE_TOKEN),
        compressed_vocab_size=int(token_map.max()) + 1,
    )
    config = model_config_from_dict(raw, source=f"preset {preset}")
    build_engram_constants(config, token_map)  # checks that tables and tokenizer fit
    specs = expected_tensors(config)
    tensors = dict(draw_weights(specs, config, seed=seed))
    file_types = {name: spec.dtype.file_types[0] for name, spec in specs.items()}
    index = write_safetensors(folder / SINGLE_NAME, tensors, file_types)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    for name, content in {
        "config.json": raw,
        INDEX_NAME: index,
        "tokenizer_config.json": tokenizer_settings(config.max_position_embeddings),
        "generation_config.json": _generation_settings(raw),
    }.items():
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    return sum(spec.num_bytes for spec in specs.values())


def _generation_settings(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": raw["bos_token_id"],
        "eos_token_id": raw["eos_token_id"],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
