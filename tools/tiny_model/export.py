"""Writes the trained masters as a checkpoint in the released format.

python -m tools.tiny_model.export --masters DIR --out CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from tools.tiny_model.checkpoint import load_masters
from tools.tiny_model.config import raw_config
from tools.tiny_model.params import Group, build_groups, cook, init_masters
from torch import Tensor

from dsserve.config.model import ModelConfig, model_config_from_dict
from dsserve.debug.safetensors_writer import write_safetensors
from dsserve.debug.tokenizer_builder import tokenizer_settings
from dsserve.models.deepseek_v4.checkpoint import INDEX_NAME, SINGLE_NAME
from dsserve.models.deepseek_v4.tensors import ROW_BLOCK, StorageType, expected_tensors
from dsserve.models.deepseek_v4.weight_codes import decode_fp4, decode_fp8, encode_fp4, encode_fp8

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKENIZER = Path(__file__).with_name("tokenizer.json")


class PackingError(Exception):
    """A tensor does not decode to what was trained."""


def encode_group(group: Group, master: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a group; codes must decode to exactly what the training forward used.

    Raises:
        PackingError: If one does not.
    """
    cooked = cook(group, master)
    for name, value in zip(group.members, cooked, strict=True):
        if group.kind is StorageType.F32:
            yield name, value.contiguous()
            if name.endswith("gate.bias"):
                yield f"{name}_vl", value.clone()
            continue
        if group.kind is StorageType.BF16:
            yield name, value.to(torch.bfloat16).contiguous()
            continue
        wide = value.float()
        if group.kind is StorageType.FP4:
            codes, scale = encode_fp4(wide, block=ROW_BLOCK)
            decoded = decode_fp4(codes, scale)
        else:
            rows, columns = (1, ROW_BLOCK) if group.is_table else config.weight_block_size
            codes, scale = encode_fp8(wide, block_rows=rows, block_columns=columns)
            decoded = decode_fp8(codes, scale)
        if not torch.equal(decoded, wide):
            raise PackingError(f"{name} does not pack without loss")
        yield name, codes
        yield f"{name.removesuffix('weight')}scale", scale


def export(masters: Path, out: Path) -> int:
    """Write the checkpoint; a missing draft head is exported untrained.

    Returns:
        Bytes of the tensor file.
    """
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    raw = raw_config(tokenizer)
    config = model_config_from_dict(raw, source="tiny_model")
    tensors: dict[str, Tensor] = {}
    for draft in (False, True):
        groups = build_groups(config, draft=draft)
        try:
            values = load_masters(masters, "draft" if draft else "target")
        except FileNotFoundError:
            if not draft:
                raise
            values = init_masters(groups, config, seed=0)
        for group in groups:
            tensors.update(encode_group(group, values[group.key], config))
    specs = expected_tensors(config, draft=True)
    out.mkdir(parents=True, exist_ok=True)
    types = {name: spec.dtype.file_types[0] for name, spec in specs.items()}
    index = write_safetensors(out / SINGLE_NAME, {name: tensors[name] for name in specs}, types)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    # Greedy, for a model this small is right by its first choice or not at all.
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    for name, content in {
        "config.json": raw,
        INDEX_NAME: index,
        "tokenizer_config.json": tokenizer_settings(config.max_position_embeddings),
        "generation_config.json": generation,
    }.items():
        (out / name).write_text(
            json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return (out / SINGLE_NAME).stat().st_size


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masters", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    size = export(options.masters, options.out)
    sys.stdout.write(f"{options.out}: {size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
