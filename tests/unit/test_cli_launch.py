"""`dsserve launch`: what it hands to the server, and what --dry-run prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from dsserve.cli import default_model
from dsserve.cli.main import main

if TYPE_CHECKING:
    from dsserve.config.server import ServerConfig

MODEL_WITH_ENGRAM = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
# The geometry of the released V4.1 attention (model.md, sections 10 and 11) with few layers' worth of tables.
CONFIG = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 508,
    "text_config": {
        "vocab_size": 512,
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 2,
        "swiglu_limit": 2.5,
        "rms_norm_eps": 1e-20,
        "rope_theta": 10000.0,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 2, 1, 1, 0],
        "compress_rope_theta": 160000.0,
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 16,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [0],
        "engram_num_embeddings": [2914],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 211,
        "engram_n_heads": 4,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 439,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 509,
        "dspark_target_layer_ids": [1, 2, 3],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(folder)


@pytest.fixture
def served(monkeypatch):
    """Replace the server by one that notes its configuration and returns 7."""
    configs: list[ServerConfig] = []

    def run_server(config: ServerConfig) -> int:
        configs.append(config)
        return 7

    module = ModuleType("dsserve.entrypoints.server")
    vars(module)["run_server"] = run_server
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return configs


def test_the_server_gets_the_resolved_configuration_and_gives_the_exit_code(checkpoint, served):
    assert (
        main(
            [
                "launch",
                "--model-path",
                checkpoint,
                "--port=31000",
                "--api-key",
                "a",
                "--api-key",
                "b",
            ]
        )
        == 7
    )
    (config,) = served
    assert config.port == 31000
    assert config.api_key == ("a", "b")
    assert config.served_model_name == "some-model"
    assert config.page_size == 128
    assert config.context_length == 65536


def test_automatic_values_are_told(checkpoint, served, capsys):
    assert main(["launch", "--model-path", checkpoint, "--page-size", "64"]) == 7
    err = capsys.readouterr().err
    assert "chunked_prefill_size=1024" in err
    assert "device=cpu" in err
    assert "page_size=" not in err


def test_variables_reach_the_server_and_flags_beat_them(checkpoint, served, monkeypatch):
    monkeypatch.setenv("DSSERVE_PORT", "31001")
    monkeypatch.setenv("DSSERVE_PAGE_SIZE", "64")
    assert main(["launch", "--model-path", checkpoint, "--page-size", "32"]) == 7
    assert (served[0].port, served[0].page_size) == (31001, 32)


def test_without_a_model_the_embedded_one_is_served(checkpoint, served, monkeypatch):
    monkeypatch.setattr("dsserve.cli.launch.embedded_model", lambda: checkpoint)
    assert main(["launch"]) == 7
    assert served[0].model_path == checkpoint


def test_dry_run_prints_configuration_pools_and_concurrency(checkpoint, served, capsys):
    code = main(
        [
            "launch",
            "--dry-run",
            "--model-path",
            checkpoint,
            "--max-total-tokens",
            "1000000",
            "--api-key",
            "hidden",
        ]
    )
    out = capsys.readouterr().out
    assert (code, served) == (0, [])
    assert "hidden" not in out
    assert re.search(r"^  page_size = 128$", out, re.MULTILINE)
    # One ratio-2 and one ratio-1 source: 1.5 rows a token, each 288 bytes of KV and 68 of index key.
    assert "Bytes per token: 534" in out
    num_pages = 1_000_000 // 128
    assert f"{num_pages} pages of 128 tokens" in out
    assert "257 request slots" in out
    expected = {"4K": 4096, "32K": 32768, "128K": 131072, "1M": 1048576}
    for name, context in expected.items():
        count = min(256, num_pages // (context // 128))
        assert re.search(rf"at +{name}: {count}\b", out)
    assert re.search(r"at  32K: \d+$", out, re.MULTILINE)
    assert re.search(r"at 128K: \d+ +\(beyond the context length, 65536\)", out)


def test_dry_run_tells_the_bytes_of_the_engram_tables(served, capsys):
    arguments = ["--dry-run", "--model-path", str(MODEL_WITH_ENGRAM), "--engram-placement", "host"]
    assert main(["launch", *arguments]) == 0
    rows = 6660
    assert f"Engram tables (host): 2 with {rows} rows of 33 bytes" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["auto", "huggingface", "fastokens"])
def test_every_tokenizer_backend_can_be_chosen(checkpoint, served, backend):
    assert main(["launch", "--model-path", checkpoint, "--tokenizer-backend", backend]) == 7
    assert [config.tokenizer_backend for config in served] == [backend]


def test_a_pool_without_a_page_is_refused(checkpoint, capsys):
    assert main(["launch", "--dry-run", "--model-path", checkpoint, "--max-total-tokens", "1"]) == 2
    assert "--max-total-tokens" in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_refused_in_one_line(tmp_path, capsys):
    assert main(["launch", "--model-path", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "config.json" in err
    assert err.count("\n") == 1


def test_an_installation_without_the_embedded_model_says_so(tmp_path, monkeypatch, capsys):
    package = tmp_path / "package" / "__init__.py"
    monkeypatch.setattr(default_model.dsserve, "__file__", str(package))
    assert main(["launch"]) == 2
    err = capsys.readouterr().err
    assert "embedded model is missing" in err
    assert "--model-path" in err
    assert err.count("\n") == 1
