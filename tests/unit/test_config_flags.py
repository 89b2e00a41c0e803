"""The flag table: names, defaults, what works, and the checks of single values."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dsserve.config.flag import CURRENT_MILESTONE, Kind
from dsserve.config.server import FLAG_GROUPS, ServerConfig, all_flags, spellings
from dsserve.config.values import format_size, read_size
from dsserve.errors import ConfigError

# What the specification lists as working so far, and nothing else.
WORKING = [
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "load_format",
    "trust_remote_code",
    "context_length",
    "dtype",
    "quantization",
    "json_model_override_args",
    "host",
    "port",
    "api_key",
    "admin_api_key",
    "api_profile",
    "config",
    "skip_server_warmup",
    "shutdown_grace_period",
    "max_payload_size",
    "tokenizer_worker_num",
    "tokenizer_backend",
    "stream_interval",
    "reasoning_parser",
    "tool_call_parser",
    "default_chat_template_kwargs",
    "sampling_defaults",
    "enable_cache_report",
    "mem_fraction_static",
    "max_total_tokens",
    "max_running_requests",
    "max_queued_requests",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "prefill_max_requests",
    "prefill_max_defer",
    "inbatch_prefix_hold",
    "max_overtake",
    "enable_priority_scheduling",
    "priority_scheduling_preemption_threshold",
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "abort_on_priority_when_disabled",
    "fair_by",
    "request_waiting_timeout",
    "request_running_timeout",
    "allow_auto_truncate",
    "disable_consecutive_prefill_overlap",
    "enable_mixed_chunk",
    "prefill_decode_interval",
    "schedule_policy",
    "schedule_conservativeness",
    "retraction_policy",
    "retraction_backup",
    "disable_overlap_schedule",
    "page_size",
    "disable_radix_cache",
    "radix_eviction_policy",
    "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay",
    "engram_placement",
    "engram_cache_size",
    "engram_memory_limit",
    "enable_deterministic_inference",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_dspark_verify",
    "speculative_dspark_sampling",
    "speculative_dspark_cost_table",
    "speculative_dspark_temperatures",
    "speculative_use_block_verification",
    "random_seed",
    "log_level",
    "log_json",
    "log_requests",
    "log_requests_level",
    "decode_log_interval",
    "disable_metrics",
    "watchdog_timeout",
    "dry_run",
    "device",
    "cuda_graph_max_bs",
    "disable_cuda_graph",
    "numerics",
]

FLAGS = all_flags()
NAMES = [flag.name for flag in FLAGS]


def test_exactly_the_listed_flags_work():
    assert sorted(flag.name for flag in FLAGS if flag.works) == sorted(WORKING)


def test_every_field_belongs_to_one_group():
    fields = [field.name for field in dataclasses.fields(ServerConfig)]
    assert sorted(fields) == sorted(NAMES)
    assert len(NAMES) == len(set(NAMES))
    assert sum(len(dataclasses.fields(options)) for options in FLAG_GROUPS.values()) == len(NAMES)


def test_spellings_are_unique_and_switches_have_no_negation_twins():
    all_spellings = [name for flag in FLAGS for name in (*flag.on, *flag.off)]
    assert len(all_spellings) == len(set(all_spellings))
    assert set(all_spellings) == set(spellings())
    assert not [name for name in all_spellings if name.startswith("--no-")]
    assert not [name for name in all_spellings if "_" in name or not name.startswith("--")]


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("host", "127.0.0.1"),
        ("port", 30000),
        ("max_running_requests", 256),
        ("max_prefill_tokens", 16384),
        ("shutdown_grace_period", 180),
        ("max_payload_size", 64 * 2**20),
        ("tokenizer_worker_num", 2),
        ("stream_interval", 1),
        ("decode_log_interval", 40),
        ("watchdog_timeout", 300),
        ("log_requests_level", 2),
        ("schedule_policy", "fcfs"),
        ("numerics", "released"),
        ("tp_size", 1),
        ("hicache_ratio", 2.0),
        ("disaggregation_bootstrap_port", 8998),
        ("eplb_rebalance_num_iterations", 1000),
        ("tbo_token_distribution_threshold", 0.48),
        ("weight_loader_prefetch_num_threads", 4),
    ],
)
def test_defaults_are_those_of_the_flag_table(name, default):
    assert getattr(ServerConfig(), name) == default


def test_defaults_are_valid():
    ServerConfig().validate()


@pytest.mark.parametrize("flag", FLAGS, ids=NAMES)
def test_default_of_a_choice_is_one_of_the_choices(flag):
    default = getattr(ServerConfig(), flag.name)
    if flag.choices and default is not None:
        assert default in flag.choices


def _other_value(flag):
    """A value of the right type that is not the default."""
    default = getattr(ServerConfig(), flag.name)
    if flag.choices:
        return next(value for value in (*flag.choices, "unheard-of") if value != default)
    if flag.kind is Kind.SWITCH:
        return not default
    if flag.kind is Kind.JSON:
        return {"key": 1}
    if flag.is_repeated:
        return ("one", "two")
    if flag.kind is Kind.TEXT:
        return "text"
    smallest = flag.minimum if flag.minimum is not None else 0
    return next(n for n in (smallest, smallest + 1, smallest + 2) if n != default)


@pytest.mark.parametrize("flag", FLAGS, ids=NAMES)
def test_every_field_survives_the_round_trip_through_json(flag):
    config = ServerConfig(**{flag.name: _other_value(flag)})
    assert config != ServerConfig()
    again = ServerConfig.from_json(config.to_json())
    assert again == config
    assert type(getattr(again, flag.name)) is type(getattr(config, flag.name))


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if not flag.works], ids=lambda f: f.name)
def test_a_value_of_a_flag_that_does_not_work_yet_is_refused(flag):
    config = ServerConfig(**{flag.name: _other_value(flag)})
    with pytest.raises(ConfigError, match=rf"{flag.spelling} .*does not work yet"):
        config.validate()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        (flag, value)
        for flag in FLAGS
        for value, since in flag.choices.items()
        if flag.works and since > CURRENT_MILESTONE
    ],
    ids=lambda item: getattr(item, "name", item),
)
def test_a_choice_that_does_not_work_yet_is_refused_with_those_that_do(flag, value):
    with pytest.raises(ConfigError, match="does not work yet") as caught:
        ServerConfig(**{flag.name: value}).validate()
    assert all(choice in str(caught.value) for choice in flag.working_choices)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"page_size": 48}, "use 32 or 64"),
        ({"page_size": 1}, "between 2"),
        ({"port": 0}, "between 1 and 65535"),
        ({"port": 65536}, "between 1 and 65535"),
        ({"port": True}, "whole number"),
        ({"mem_fraction_static": 1.0}, "between 0 and 1"),
        ({"mem_fraction_static": 0.0}, "between 0 and 1"),
        ({"schedule_conservativeness": 0.0}, "positive"),
        ({"chunked_prefill_size": 0}, "-1"),
        ({"chunked_prefill_size": -2}, "between -1 and"),
        ({"max_running_requests": 0}, "between 1"),
        ({"log_level": "infos"}, "did you mean info"),
        ({"log_requests_level": 4}, "between 0 and 3"),
        ({"host": "1.2.3.400"}, "no valid IPv4"),
        ({"host": "a b"}, "no host name"),
        ({"model_path": "/no/such/folder"}, "is no folder"),
        ({"tokenizer_path": "/no/such/file"}, "does not exist"),
        ({"served_model_name": " "}, "empty"),
        ({"api_key": ("with blank",)}, "without blanks"),
        ({"api_key": ["list"]}, "tuple"),
        ({"page_size": 64, "max_total_tokens": 63}, "no page of 64"),
        ({"dry_run": 1}, "true or false"),
        ({"json_model_override_args": "{}"}, "an object"),
    ],
)
def test_wrong_values_are_refused_with_a_remedy(values, said):
    with pytest.raises(ConfigError, match=said):
        ServerConfig(**values).validate()


def test_a_wrong_key_is_not_repeated_in_the_message():
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=("top secret",)).validate()
    assert "top secret" not in str(caught.value)


def test_public_form_hides_keys():
    config = ServerConfig(api_key=("k1",), admin_api_key="k2")
    assert "k1" not in json.dumps(config.to_public_dict())
    assert "k2" not in json.dumps(config.to_public_dict())


@pytest.mark.parametrize("text", ["", "[]", "{", '{"prot": 1}'])
def test_broken_json_is_refused(text):
    with pytest.raises(ConfigError):
        ServerConfig.from_json(text)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("1024", 1024), ("64MiB", 64 * 2**20), ("1.5 GB", 15 * 10**8), ("2k", 2000)],
)
def test_sizes_are_read(text, num_bytes):
    assert read_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 parsec", "1e3", "1_000"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        read_size(text)


def test_sizes_are_written_with_binary_units():
    assert [format_size(n) for n in (0, 1023, 1024, 3 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
