"""Settings that were once taken in silence: each must be refused."""

import pytest

from dsserve.config.sources import load_config
from dsserve.errors import ConfigError


@pytest.mark.parametrize("text", ["", ",", ",,"])
def test_variable_without_a_key_does_not_open_the_server(text):
    with pytest.raises(ConfigError, match="DSSERVE_API_KEY: the value is empty"):
        load_config({}, {"DSSERVE_API_KEY": text})


def test_file_without_a_key_does_not_open_the_server(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("api-key: []\n")
    with pytest.raises(ConfigError, match="the value is empty"):
        load_config({"config": str(path)}, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 31000\nport: 31001\n", "the key port stands twice"),
        ("page-size: 128\npage_size: 64\n", "page-size and page_size set the same flag"),
        (
            "enable-encoder-swa-bounded-replay: true\ndisable-encoder-swa-bounded-replay: true\n",
            "set the same flag",
        ),
    ],
)
def test_file_that_sets_a_flag_twice_is_refused(tmp_path, text, message):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config({"config": str(path)}, {})


@pytest.mark.parametrize(
    "flag",
    [
        "max_queued_requests",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "prefill_max_requests",
        "prefill_decode_interval",
        "priority_scheduling_preemption_threshold",
        "prefill_max_defer",
        "inbatch_prefix_hold",
        "max_overtake",
        "request_waiting_timeout",
        "request_running_timeout",
    ],
)
def test_a_number_that_the_scheduler_cannot_hold_is_refused_at_the_start(flag):
    with pytest.raises(ConfigError, match=flag.replace("_", "-")):
        load_config({flag: 99_999_999_999}, {})
