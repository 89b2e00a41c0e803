"""The fake model's settings and the hash that gives its ids."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsserve.errors import ConfigError
from dsserve.worker.fake_model import FakeSettings, fake_output, next_tokens, read_fake_settings


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"draft_accept": 0.5}, "draft_accept"),
        ({"draft_accept": []}, "draft_accept"),
        ({"draft_accept": [1, -1]}, "draft_accept"),
        ({"basis_us": 1}, "basis_us"),
        ({"base_us": -1}, "negative"),
        ({"base_us": "1"}, "base_us"),
        ({"first_id": 600}, "first_id 600"),
    ],
)
def test_wrong_settings_are_refused(values, match):
    with pytest.raises(ConfigError, match=match):
        read_fake_settings(values, vocab_size=512)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 511), min_size=1, max_size=40), st.integers(1, 20))
def test_hash_of_a_step_agrees_with_the_one_in_plain_integers(prompt, count):
    out = fake_output(prompt, count)
    ids = prompt + out[:-1]
    context = np.array([[-1] * max(0, 16 - len(ids)) + ids[-16:]])
    got = next_tokens(context, np.array([len(ids)]), FakeSettings())
    assert got.tolist() == out[-1:]
    assert all(3 <= token < 97 for token in out)


def test_hash_depends_on_position_and_on_sixteen_ids():
    ids = list(range(10, 30))
    base = fake_output(ids, 1)
    changed = [fake_output([*ids[:4], ids[4] + d, *ids[5:]], 1) for d in range(1, 6)]
    shifted = [fake_output([0] * d + ids, 1) for d in range(1, 6)]
    unseen = [fake_output([*ids[:3], ids[3] + d, *ids[4:]], 1) for d in range(1, 6)]
    assert any(out != base for out in changed)
    assert any(out != base for out in shifted)
    assert all(out == base for out in unseen)
