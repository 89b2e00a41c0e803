"""Which token does the fake model emit next, and how long does a step take?

`serving.md` 0.4. The settings are the key `fake` of `--json-model-override-args`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsserve.errors import ConfigError

CONTEXT_LEN = 16
"""Ids before the next token that decide it."""

FIRST_PRINTABLE_ID, NUM_PRINTABLE_IDS = 3, 94
"""Ids of the ASCII characters '!' to '~' in DeepSeek's tokenizers, after the three special ones."""

_SEED = 0x9E3779B97F4A7C15
_MULTIPLIER = 0xBF58476D1CE4E5B9
_MASK = 2**64 - 1


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times and ranges of the fake model.

    Attributes:
        base_us: Time of a step without rows.
        row_us: Added per row.
        pair_us: Added per pair of a row and a position it attends to.
        window: Replaces the model's sliding window (read by `config/model.py`).
        first_id: First id it emits, unless a script says otherwise.
        num_ids: How many ids follow each other from there.
        draft_accept: How many drafts are accepted by a verification whose anchor is at position p:
            the entry p modulo their number, if there are so many drafts. None: no drafts.
    """

    base_us: float = 0.0
    row_us: float = 0.0
    pair_us: float = 0.0
    window: int | None = None
    first_id: int = FIRST_PRINTABLE_ID
    num_ids: int = NUM_PRINTABLE_IDS
    draft_accept: list[int] | None = None

    def step_s(self, positions: NDArray[np.int64]) -> float:
        """Seconds that a step takes whose rows stand at `positions`."""
        time_us = self.base_us + self.row_us * len(positions)
        if self.pair_us:
            time_us += self.pair_us * float((positions + 1).sum())
        return time_us * 1e-6


def read_fake_settings(values: Mapping[str, Any], *, vocab_size: int) -> FakeSettings:
    """Check the settings of the fake model.

    Raises:
        ConfigError: A key is unknown (or does not work in this version) or a value is wrong.
    """
    name = "--json-model-override-args"
    try:
        settings = msgspec.convert(dict(values), FakeSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: fake: {error}", param=name) from None
    if min(settings.base_us, settings.row_us, settings.pair_us) < 0:
        raise ConfigError(f"{name}: fake: times must not be negative", param=name)
    pattern = settings.draft_accept
    if pattern is not None and (not pattern or min(pattern) < 0):
        raise ConfigError(
            f"{name}: fake.draft_accept must be a list of numbers, none negative", param=name
        )
    if settings.first_id < 0 or settings.num_ids < 1 or settings.first_id >= vocab_size:
        raise ConfigError(
            f"{name}: fake: first_id {settings.first_id} and num_ids {settings.num_ids} give no id "
            f"below the vocabulary size {vocab_size}",
            param=name,
        )
    num_ids = min(settings.num_ids, vocab_size - settings.first_id)
    return msgspec.structs.replace(settings, num_ids=num_ids)


def next_tokens(
    context: NDArray[np.int64], positions: NDArray[np.int64], settings: FakeSettings
) -> NDArray[np.int32]:
    """Hash the last ids and the position of each request's next token.

    Args:
        context: [requests, 16] ids before the next token, oldest first; -1 before the start.
        positions: [requests] absolute position of the next token.
        settings: Gives the range of ids.
    """
    state = np.full(len(positions), _SEED, dtype=np.uint64)
    multiplier, shift = np.uint64(_MULTIPLIER), np.uint64(29)
    columns = np.concatenate([context, positions[:, None]], axis=1).astype(np.uint64)
    for column in columns.T:
        state = (state ^ column) * multiplier
        state ^= state >> shift
    return (settings.first_id + (state % np.uint64(settings.num_ids)).astype(np.int64)).astype(
        np.int32
    )


def fake_output(
    prompt: Sequence[int], count: int, settings: FakeSettings | None = None
) -> list[int]:
    """Compute the output ids of a prompt, one by one, for tests of what is built on the fake model.

    Written apart from `next_tokens`, in plain integers; both must agree.
    """
    settings = settings or FakeSettings()
    ids = list(prompt)
    for _ in range(count):
        context = [-1] * max(0, CONTEXT_LEN - len(ids)) + ids[-CONTEXT_LEN:]
        state = _SEED
        for value in [*context, len(ids)]:
            state = ((state ^ (value & _MASK)) * _MULTIPLIER) & _MASK
            state ^= state >> 29
        ids.append(settings.first_id + state % settings.num_ids)
    return ids[len(prompt) :]
