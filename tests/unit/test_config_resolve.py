"""Settings that depend on the model: defaults, limits, and that resolving twice changes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dsserve.config.determinism import default_seed
from dsserve.config.resolve import default_page_size, resolve
from dsserve.config.server import ServerConfig
from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from dsserve.config.model import ModelConfig


def model(
    *, window=128, positions=4096, ratio=2, stages=0, block=5, fake=None, engram_layers=()
) -> ModelConfig:
    facts = SimpleNamespace(
        sliding_window=window,
        max_position_embeddings=positions,
        stateful_ratio=ratio,
        has_draft=stages > 0,
        engram_layer_ids=engram_layers,
        dspark_block_size=block,
        fake=fake or {},
    )
    return cast("ModelConfig", facts)


def config(**values) -> ServerConfig:
    return ServerConfig(model_path="/models/some-name/", **values)


def test_automatic_values_are_decided():
    resolved = resolve(config(), model())
    assert resolved.tokenizer_path == "/models/some-name/"
    assert resolved.served_model_name == "some-name"
    assert resolved.context_length == 4096
    assert resolved.page_size == 128
    assert resolved.chunked_prefill_size == 1024
    assert resolved.device == "cpu"
    assert resolved.speculative_algorithm == "none"
    assert resolved.enable_encoder_swa_bounded_replay is True
    assert resolved.enable_decoder_swa_bounded_replay is True
    resolved.replace(model_path=None, tokenizer_path=None).validate()


def test_resolving_twice_changes_nothing():
    once = resolve(config(page_size=64), model())
    assert resolve(once, model()) == once
    drafting = resolve(config(speculative_algorithm="DSPARK"), model(stages=2))
    assert resolve(drafting, model(stages=2)) == drafting


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("flags", "algorithm", "num_tokens"),
    [
        ({}, "DSPARK", 6),
        ({"speculative_algorithm": "DSPARK"}, "DSPARK", 6),
        ({"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 4}, "DSPARK", 4),
        ({"speculative_algorithm": "none"}, "none", None),
        ({"speculative_algorithm": "NONE"}, "none", None),
    ],
)
def test_draft_tokens_count_the_anchor(flags, algorithm, num_tokens, device):
    resolved = resolve(config(device=device, **flags), model(stages=2))
    assert resolved.speculative_algorithm == algorithm
    assert resolved.speculative_num_draft_tokens == num_tokens


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_drafts_are_on_by_default_where_there_is_a_head(device):
    drafting = resolve(config(device=device), model(stages=2))
    assert drafting.speculative_algorithm == "DSPARK"
    # On CUDA the only verification whose steps are replayed graphs.
    assert drafting.speculative_dspark_verify == "static"
    assert resolve(config(device=device), model()).speculative_algorithm == "none"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("verify", ["static", "cap", "compact"])
def test_verification_is_what_the_flag_says(device, verify):
    given = config(device=device, speculative_dspark_verify=verify)
    assert resolve(given, model(stages=2)).speculative_dspark_verify == verify


def test_the_fake_model_drafts_where_it_is_told_how():
    flags = {"load_format": "fake", "speculative_algorithm": "DSPARK"}
    drafting = resolve(config(**flags), model(fake={"draft_accept": [1]}))
    assert drafting.speculative_algorithm == "DSPARK"
    with pytest.raises(ConfigError, match="draft_accept"):
        resolve(config(**flags), model(stages=2))


@pytest.mark.parametrize(
    ("flags", "stages", "param"),
    [
        ({"speculative_algorithm": "DSPARK"}, 0, "--speculative-algorithm"),
        (
            {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 7},
            2,
            "--speculative-num-draft-tokens",
        ),
        (
            {"speculative_algorithm": "none", "speculative_num_draft_tokens": 4},
            2,
            "--speculative-num-draft-tokens",
        ),
        (
            {"speculative_algorithm": "DSPARK", "speculative_use_block_verification": True},
            2,
            "--speculative-use-block-verification",
        ),
        (
            {"speculative_algorithm": "none", "speculative_dspark_verify": "compact"},
            2,
            "--speculative-dspark-verify",
        ),
        ({"speculative_dspark_sampling": "rejection"}, 0, "--speculative-dspark-sampling"),
        ({"speculative_dspark_cost_table": "costs.json"}, 2, "--speculative-dspark-cost-table"),
        (
            {"speculative_algorithm": "none", "speculative_use_block_verification": True},
            2,
            "--speculative-use-block-verification",
        ),
    ],
)
def test_drafts_that_cannot_be_are_refused(flags, stages, param):
    with pytest.raises(ConfigError) as raised:
        resolve(config(**flags), model(stages=stages))
    assert raised.value.param == param


def test_what_the_user_gave_stays():
    given = config(
        tokenizer_path="/other",
        served_model_name="name",
        context_length=100,
        page_size=32,
        chunked_prefill_size=-1,
        enable_encoder_swa_bounded_replay=False,
        enable_decoder_swa_bounded_replay=False,
    )
    resolved = resolve(given, model())
    for name in (
        "tokenizer_path",
        "served_model_name",
        "context_length",
        "page_size",
        "chunked_prefill_size",
        "enable_encoder_swa_bounded_replay",
        "enable_decoder_swa_bounded_replay",
    ):
        assert getattr(resolved, name) == getattr(given, name)


@pytest.mark.parametrize(
    ("window", "page"), [(4096, 128), (128, 128), (127, 64), (16, 16), (17, 16), (3, 2), (1, 2)]
)
def test_default_page_is_the_window_where_that_is_smaller(window, page):
    assert default_page_size(model(window=window)) == page


def test_default_chunk_holds_a_window_and_a_page():
    assert resolve(config(), model(window=4096)).chunked_prefill_size == 4096 + 128


@pytest.mark.parametrize("chunk", [191, 128, 1])
def test_a_chunk_below_window_plus_page_is_refused_with_the_least_one(chunk):
    with pytest.raises(ConfigError, match="at least 192"):
        resolve(config(page_size=64, chunked_prefill_size=chunk), model())


def test_the_smallest_chunk_is_accepted():
    assert (
        resolve(config(page_size=64, chunked_prefill_size=192), model()).chunked_prefill_size == 192
    )


def test_without_encoder_replay_a_chunk_of_one_page_is_enough():
    given = config(page_size=64, chunked_prefill_size=64, enable_encoder_swa_bounded_replay=False)
    assert resolve(given, model()).chunked_prefill_size == 64
    with pytest.raises(ConfigError, match="at least 64"):
        resolve(given.replace(chunked_prefill_size=63), model())


def test_a_page_that_splits_a_compression_group_is_refused():
    with pytest.raises(ConfigError, match="multiple of 128"):
        resolve(config(page_size=64), model(ratio=128))


def test_a_context_beyond_the_positions_of_the_model_is_refused():
    with pytest.raises(ConfigError, match="up to 4096"):
        resolve(config(context_length=4097), model())


def test_a_pool_below_one_page_is_refused():
    with pytest.raises(ConfigError, match="no page of 128"):
        resolve(config(max_total_tokens=127), model())


def test_the_parser_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="use deepseek-v41 or auto"):
        resolve(config(reasoning_parser="deepseek-v4"), model())


def test_deterministic_inference_turns_both_replays_off():
    resolved = resolve(config(enable_deterministic_inference=True), model())
    assert resolved.enable_encoder_swa_bounded_replay is False
    assert resolved.enable_decoder_swa_bounded_replay is False
    assert resolve(resolved, model()) == resolved


@pytest.mark.parametrize(
    "values",
    [
        {"enable_encoder_swa_bounded_replay": True},
        {"enable_decoder_swa_bounded_replay": True},
        {"device": "cuda"},
        {"speculative_dspark_sampling": "rejection"},
    ],
)
def test_deterministic_inference_refuses_what_makes_results_depend_on_others(values):
    with pytest.raises(ConfigError, match="--enable-deterministic-inference does not go with --"):
        resolve(config(enable_deterministic_inference=True, **values), model())


def test_deterministic_inference_lists_all_that_stands_against_it():
    with pytest.raises(ConfigError) as caught:
        resolve(
            config(
                enable_deterministic_inference=True,
                device="cuda",
                enable_encoder_swa_bounded_replay=True,
            ),
            model(),
        )
    assert "--device cuda" in str(caught.value)
    assert "--enable-encoder-swa-bounded-replay" in str(caught.value)


def test_requests_without_a_seed_share_one_only_in_deterministic_inference():
    assert default_seed(config()) is None
    assert default_seed(config(random_seed=5)) is None
    assert default_seed(config(enable_deterministic_inference=True)) == 0
    assert default_seed(config(enable_deterministic_inference=True, random_seed=5)) == 5


def test_engram_tables_are_on_the_device_unless_a_flag_says_otherwise():
    assert resolve(config(), model(engram_layers=(1,))).engram_placement == "device"
    placed = config(engram_placement="sharded", engram_cache_size=10)
    assert resolve(placed, model(engram_layers=(1,))).engram_placement == "sharded"


@pytest.mark.parametrize(
    ("values", "layers", "named"),
    [
        ({"engram_cache_size": 10}, (1,), "--engram-cache-size 10"),
        ({"engram_placement": "host"}, (), "--engram-placement host: the model has no"),
        ({"engram_placement": "host", "device": "cuda"}, (1,), "does not work yet with --device"),
    ],
)
def test_engram_flags_that_cannot_work_are_refused(values, layers, named):
    with pytest.raises(ConfigError, match=named):
        resolve(config(**values), model(engram_layers=layers))
