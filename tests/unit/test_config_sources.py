"""Flags, variables and the config file: precedence, refusals, notices."""

from __future__ import annotations

import pytest

from dsserve.config.server import all_flags
from dsserve.config.sources import load_config
from dsserve.errors import ConfigError


def write_config(folder, text):
    path = folder / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flag_beats_variable_beats_file(tmp_path):
    path = write_config(tmp_path, "port: 1001\nmax-running-requests: 11\npage_size: 32\n")
    variables = {"DSSERVE_PORT": "1002", "DSSERVE_MAX_RUNNING_REQUESTS": "12"}
    loaded = load_config({"config": path, "port": "1003"}, variables)
    config = loaded.config
    assert (config.port, config.max_running_requests, config.page_size) == (1003, 12, 32)
    assert loaded.sources["port"] == "--port"
    assert loaded.sources["max_running_requests"] == "DSSERVE_MAX_RUNNING_REQUESTS"
    assert loaded.sources["page_size"] == f"page_size in {path}"


def test_the_file_may_be_named_by_a_variable(tmp_path):
    path = write_config(tmp_path, "port: 1001\n")
    assert load_config({}, {"DSSERVE_CONFIG": path}).config.port == 1001


def test_without_settings_everything_has_its_default():
    loaded = load_config({}, {"HOME": "/root", "PATH": "/bin"})
    assert loaded.sources == {}
    assert loaded.notices == ()


@pytest.mark.parametrize(
    ("variables", "field", "value"),
    [
        ({"DSSERVE_ENABLE_MIXED_CHUNK": "1"}, "enable_mixed_chunk", True),
        ({"DSSERVE_ENABLE_MIXED_CHUNK": "false"}, "enable_mixed_chunk", False),
        (
            {"DSSERVE_DISABLE_ENCODER_SWA_BOUNDED_REPLAY": "true"},
            "enable_encoder_swa_bounded_replay",
            False,
        ),
        (
            {"DSSERVE_ENABLE_ENCODER_SWA_BOUNDED_REPLAY": "0"},
            "enable_encoder_swa_bounded_replay",
            False,
        ),
        ({"DSSERVE_ENABLE_METRICS": "0"}, "disable_metrics", True),
        ({"DSSERVE_API_KEY": "a,b"}, "api_key", ("a", "b")),
        ({"DSSERVE_MAX_PAYLOAD_SIZE": "2 MiB"}, "max_payload_size", 2 * 2**20),
        (
            {"DSSERVE_JSON_MODEL_OVERRIDE_ARGS": '{"fake": {"base_us": 5}}'},
            "json_model_override_args",
            {"fake": {"base_us": 5}},
        ),
    ],
)
def test_variables_are_read_as_their_flag_is(variables, field, value):
    assert getattr(load_config({}, variables).config, field) == value


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("api-key: [a, b]", "api_key", ("a", "b")),
        ("api-key: a", "api_key", ("a",)),
        ("enable-mixed-chunk: true", "enable_mixed_chunk", True),
        ("disable-decoder-swa-bounded-replay: true", "enable_decoder_swa_bounded_replay", False),
        (
            "json-model-override-args: {fake: {base_us: 5}}",
            "json_model_override_args",
            {"fake": {"base_us": 5}},
        ),
        ("mem-fraction-static: 0.5", "mem_fraction_static", 0.5),
        ("max-payload-size: 4096", "max_payload_size", 4096),
        ("port:", "port", 30000),
        ("", "port", 30000),
    ],
)
def test_file_values_are_read_as_their_flag_is(tmp_path, text, field, value):
    path = write_config(tmp_path, text)
    assert getattr(load_config({"config": path}, {}).config, field) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "unknown key prot; did you mean port"),
        ("- port", "expected lines such as"),
        ("port: [1, 2]", "one value"),
        ("port: true", "one value"),
        ("a: b: c", "no valid YAML"),
        ("config: other.yaml", "cannot name another"),
        ("tp-size: 1", "does not work yet"),
        ("enable-mixed-chunk: maybe", "neither true nor false"),
        ("page-size: 48", "power of two"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, said):
    path = write_config(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config({"config": path}, {})
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load_config({"config": str(tmp_path / "absent.yaml")}, {})


@pytest.mark.parametrize(
    "flag", [flag for flag in all_flags() if not flag.works], ids=lambda f: f.name
)
def test_a_flag_that_does_not_work_yet_is_refused_as_variable_too(flag):
    name = "DSSERVE_" + flag.name.upper()
    with pytest.raises(ConfigError, match=rf"{name} is known but does not work yet"):
        load_config({}, {name: "1"})


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("port", "http", "--port: 'http' is not a whole number"),
        ("port", "3_0", "not a whole number"),
        ("port", "٣", "not a whole number"),
        ("mem_fraction_static", "nan", "not a number"),
        ("max_payload_size", "big", "a size such as 64MiB"),
        ("json_model_override_args", "{", "no valid JSON"),
        ("json_model_override_args", "[1]", "expected a JSON object"),
        ("served_model_name", "", "empty"),
        ("schedule_policy", "lpn", "did you mean lpm"),
    ],
)
def test_wrong_texts_name_the_flag_and_what_is_expected(name, raw, said):
    with pytest.raises(ConfigError, match=said):
        load_config({name: raw}, {})


def test_flags_without_effect_are_accepted_with_a_notice():
    loaded = load_config({"trust_remote_code": True, "enable_cache_report": True}, {})
    assert any("never runs code" in notice for notice in loaded.notices)
    assert any("always reported" in notice for notice in loaded.notices)


def test_an_unknown_variable_is_named_with_the_nearest_known_one():
    loaded = load_config({}, {"DSSERVE_PAGESIZE": "64"})
    assert loaded.notices == (
        "variable DSSERVE_PAGESIZE is not known and has no effect (did you mean DSSERVE_PAGE_SIZE?)",
    )


def test_variables_that_are_no_flags_cause_no_notice():
    others = {
        "DSSERVE_GOLDEN": "/y",
        "DSSERVE_KERNEL_RMS_NORM": "reference",
    }
    assert load_config({}, others).notices == ()


def test_what_kubernetes_sets_for_a_service_called_dsserve_does_not_become_the_port():
    variables = {
        "DSSERVE_PORT": "tcp://10.0.0.7:80",
        "DSSERVE_SERVICE_HOST": "10.0.0.7",
        "DSSERVE_PORT_80_TCP_ADDR": "10.0.0.7",
    }
    loaded = load_config({}, variables)
    assert loaded.config.port == 30000
    assert loaded.notices == ("variable DSSERVE_PORT looks set by Kubernetes and is ignored",)


@pytest.mark.parametrize(
    ("variable", "placement"),
    [
        ("SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", "host"),
        ("SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS", "sharded"),
    ],
)
def test_engram_variables_of_sglang_map_to_the_placement(variable, placement):
    mapped = load_config({}, {variable: "1"})
    assert mapped.config.engram_placement == placement
    assert mapped.sources["engram_placement"] == variable
    assert f"{variable} stands for --engram-placement {placement}" in mapped.notices
    off = load_config({}, {variable: "0"})
    assert off.config.engram_placement == "auto"
    assert off.notices == ()


def test_flags_and_our_own_variable_beat_the_engram_variables_of_sglang():
    theirs = {"SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": "1"}
    by_flag = load_config({"engram_placement": "host"}, theirs)
    assert by_flag.config.engram_placement == "host"
    by_variable = load_config({}, {**theirs, "DSSERVE_ENGRAM_PLACEMENT": "device"})
    assert by_variable.config.engram_placement == "device"


def test_two_engram_variables_of_sglang_contradict_each_other():
    with pytest.raises(ConfigError, match="two placements"):
        load_config(
            {},
            {
                "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "1",
                "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": "1",
            },
        )


def test_the_layout_variable_of_sglang_is_known_to_have_no_effect():
    loaded = load_config({}, {"SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT": "interleave"})
    assert loaded.config.engram_placement == "auto"
    assert any("HOST_TABLE_LAYOUT has no effect" in notice for notice in loaded.notices)
