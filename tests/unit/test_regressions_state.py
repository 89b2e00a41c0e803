"""Which requests a name means, and which sampling defaults a checkpoint may set."""

import asyncio
import json
import secrets

import pytest

from dsserve.entrypoints.state import LiveRequests, load_sampling_defaults
from dsserve.errors import ConfigError


async def found(name):
    live = LiveRequests()
    for number in range(64):
        live.add(number, (f"chatcmpl-{secrets.token_hex(16)}", secrets.token_hex(16)))
    live.add(100, ("cmpl-" + "ab" * 16, "a1" * 16))
    live.add(101, ("a-job", "b2" * 16))
    return live.find(name)


@pytest.mark.parametrize(
    ("name", "request_ids"),
    [
        ("a", [101]),
        ("a-job", [101]),
        ("c", []),
        ("cmpl-", []),
        ("chatcmpl-", []),
        ("cmpl-" + "ab" * 16, [100]),
        ("a1" * 16, [100]),
        ("a1" * 15, []),
    ],
)
def test_beginning_of_a_made_up_id_hits_nobody(name, request_ids):
    assert asyncio.run(found(name)) == request_ids


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": -1}',
        '{"temperature": NaN}',
        '{"temperature": Infinity}',
        '{"top_p": 7}',
        '{"top_p": 0}',
        '{"top_k": 1.5}',
        '{"top_k": 1e300}',
        '{"min_p": 2}',
        '{"repetition_penalty": 0}',
    ],
)
def test_default_out_of_range_ends_the_start(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    name = next(iter(json.loads(text)))
    with pytest.raises(ConfigError, match=f"generation_config.json: {name} is"):
        load_sampling_defaults(tmp_path)


def test_released_defaults_pass(tmp_path):
    values = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": -1}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert load_sampling_defaults(tmp_path) == {"temperature": 1.0, "top_p": 0.95, "top_k": -1}
