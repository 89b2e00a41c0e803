"""The table of expected tensors: released totals, shapes from the configuration, skips."""

from __future__ import annotations

import math

from dsserve.config.model import ModelConfig, model_config_from_dict
from dsserve.models.deepseek_v4.tensors import StorageType, expected_tensors
from dsserve.models.presets import preset_config, released_config


def tiny_config(preset: str = "tiny") -> ModelConfig:
    return model_config_from_dict(
        preset_config(preset, image_token_id=5, noise_token_id=6, compressed_vocab_size=400)
    )


def test_released_configuration_gives_the_published_totals() -> None:
    specs = expected_tensors(model_config_from_dict(released_config()))
    assert len(specs) == 96_085
    assert sum(spec.num_bytes for spec in specs.values()) == 510_286_023_000


def test_released_counts_by_class() -> None:
    specs = expected_tensors(model_config_from_dict(released_config()))
    assert sum(name.startswith("layers.7.") for name in specs) == 2334
    assert sum(name.startswith("mtp.") for name in specs) == 2401
    vision = [n for n in specs if n.startswith(("vision.", "aligner.", "image_"))]
    assert len(vision) == 266
    assert sum(".compressor." in name for name in specs) == 11
    assert sum(".indexer." in name for name in specs) == 32
    assert sum(".engram." in name for name in specs) == 12
    experts = [n for n in specs if n.startswith("layers.") and ".ffn.experts." in n]
    assert sum(name.endswith(".weight") for name in experts) == 46_080
    assert sum(name.endswith(".scale") for name in experts) == 46_080


def test_released_shapes_of_each_encoding() -> None:
    specs = expected_tensors(model_config_from_dict(released_config()))
    expected = {
        "layers.0.attn.wq_b.weight": ((32768, 1280), StorageType.F8_E4M3),
        "layers.0.attn.wq_b.scale": ((1024, 40), StorageType.F8_E8M0),
        "layers.39.ffn.experts.383.w2.weight": ((5120, 1152), StorageType.FP4),
        "layers.39.ffn.experts.383.w2.scale": ((5120, 72), StorageType.F8_E8M0),
        "layers.14.engram.embed.scale": ((384016682, 8), StorageType.F8_E8M0),
        "layers.14.engram.wkv.weight": ((25600, 6144), StorageType.F8_E4M3),
        "layers.20.attn.indexer.weights_proj.weight": ((32, 5120), StorageType.BF16),
        "layers.5.hc_ffn_fn": ((24, 20480), StorageType.F32),
        "mtp.0.main_proj.scale": ((160, 480), StorageType.F8_E8M0),
        "mtp.2.confidence_head.proj.weight": ((1, 5376), StorageType.BF16),
        "aligner.w1.weight": ((5120, 9216), StorageType.BF16),
    }
    assert {n: (specs[n].shape, specs[n].dtype) for n in expected} == expected
    assert "layers.20.attn.compressor.wgate.weight" not in specs
    assert "layers.24.attn.indexer.wk.weight" not in specs
    assert "mtp.0.norm.weight" not in specs


def test_single_draft_stage_holds_first_and_last_tensors() -> None:
    specs = expected_tensors(tiny_config("golden-g"))
    assert {"mtp.0.main_proj.weight", "mtp.0.norm.weight"} <= set(specs)
    assert not any(name.startswith("mtp.1.") for name in specs)


def test_scales_round_up_for_odd_sizes() -> None:
    specs = expected_tensors(tiny_config().replace(q_lora_rank=72))
    assert specs["layers.0.attn.wq_a.scale"].shape == (math.ceil(72 / 32), 8)


def test_skips_follow_what_is_served() -> None:
    config = model_config_from_dict(released_config())

    def loaded(**served: bool) -> set[str]:
        specs = expected_tensors(config, **served)
        return {name for name, spec in specs.items() if spec.skip_reason is None}

    text, with_draft, with_vision = loaded(), loaded(draft=True), loaded(vision=True)
    assert not any(n.startswith(("mtp.", "vision.", "aligner.", "image_")) for n in text)
    assert not any(name.endswith("bias_vl") for name in text)
    assert all(name.startswith("mtp.") for name in with_draft - text)
    assert "mtp.1.ffn.gate.bias" in with_draft
    assert "mtp.1.ffn.gate.bias_vl" not in loaded(draft=True, vision=True)
    assert "layers.0.ffn.gate.bias_vl" in with_vision
    assert len(with_vision - text) == 266 + 40


def test_text_only_configuration_expects_no_vision_tensors() -> None:
    specs = expected_tensors(tiny_config(), vision=True)
    assert not any(name.startswith(("vision.", "aligner.", "image_")) for name in specs)
