"""Which Engram table rows a token reads: vocabulary map, multipliers, primes, offsets and the n-gram hash.

Everything follows from the tokenizer and the configuration (model.md section 7); no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from dsserve.config.model import ModelConfig

#: Factor between a layer index and the seed of its multipliers (model.md 7.2).
_LAYER_SEED = 10007
#: Stands for "the whole text is one space" while the ends are stripped (model.md 7.1).
_LONE_SPACE = "\ue000"
#: What a tokenizer's decoder writes for bytes that are no complete character.
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, eq=False)
class EngramConstants:
    """The constants of all Engram layers, in the order of `engram_layer_ids`.

    Attributes:
        token_map: [vocab_size] int32, raw token id -> compressed id.
        multipliers: [layers, N] int64 with N = engram_max_ngram_size.
        primes: [layers, N - 1, heads] int64, table size of each (n-gram length, head).
        offsets: [layers, (N - 1) * heads] int64, first row of each column in the layer's table.
        pad_compressed_id: Compressed id that stands in for a blocked position.
    """

    token_map: NDArray[np.int32]
    multipliers: NDArray[np.int64]
    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    pad_compressed_id: int


def build_engram_constants(config: ModelConfig, token_map: NDArray[np.int32]) -> EngramConstants:
    """Compute the constants of every Engram layer and check them against the configuration.

    Args:
        config: The model; `engram_*` fields and `vocab_size` are used.
        token_map: From `build_token_map` or `load_token_map`.

    Raises:
        ConfigError: If the map has another size than `vocab_size` or another number of keys than
            `engram_compressed_vocab_size` (the tokenizer belongs to another model), or if the primes
            of a layer do not add up to its `engram_num_embeddings`.
    """
    if len(token_map) != config.vocab_size:
        raise ConfigError(
            f"the token map has {len(token_map)} entries, vocab_size is {config.vocab_size}: "
            "use the tokenizer.json of this checkpoint"
        )
    num_keys = int(token_map.max()) + 1
    if config.engram_layer_ids and num_keys != config.engram_compressed_vocab_size:
        raise ConfigError(
            f"tokenizer.json gives {num_keys} compressed ids, engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}: use the tokenizer.json of this checkpoint"
        )
    primes = engram_primes(
        num_layers=len(config.engram_layer_ids),
        num_ngrams=config.engram_max_ngram_size - 1,
        num_heads=config.engram_n_heads,
        vocab_size=config.engram_vocab_size,
    )
    for layer, rows, expected in zip(
        config.engram_layer_ids, primes.sum(axis=(1, 2)), config.engram_num_embeddings, strict=True
    ):
        if int(rows) != expected:
            raise ConfigError(
                f"engram_num_embeddings of layer {layer} is {expected}, but the primes from "
                f"engram_vocab_size {config.engram_vocab_size} on add up to {int(rows)}: correct config.json"
            )
    multipliers = [
        engram_multipliers(
            layer,
            compressed_vocab_size=config.engram_compressed_vocab_size,
            max_ngram_size=config.engram_max_ngram_size,
        )
        for layer in config.engram_layer_ids
    ]
    return EngramConstants(
        token_map=token_map,
        multipliers=np.array(multipliers, dtype=np.int64).reshape(-1, config.engram_max_ngram_size),
        primes=primes,
        offsets=engram_offsets(primes),
        pad_compressed_id=int(token_map[config.engram_pad_token_id]),
    )


def load_token_map(tokenizer_file: str | Path, vocab_size: int) -> NDArray[np.int32]:
    """Compute the vocabulary map of a `tokenizer.json` (about a second for 129,280 ids).

    Raises:
        ConfigError: If the file cannot be read as a tokenizer, or has ids past `vocab_size`.
    """
    from tokenizers import Tokenizer  # late: GPU machines may lack the package

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every failure
        raise ConfigError(f"cannot read the tokenizer {tokenizer_file}: {error}") from None
    return build_token_map(tokenizer, vocab_size)


def build_token_map(tokenizer: Any, vocab_size: int) -> NDArray[np.int32]:
    """Give every token id the id of its normalised text (model.md 7.1).

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        vocab_size: Length of the map; ids that the tokenizer does not know count as empty text.

    Returns:
        [vocab_size] int32; compressed ids are handed out in order of first appearance.

    Raises:
        ConfigError: If the tokenizer has ids past `vocab_size`.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        raise ConfigError(f"the tokenizer has {size} entries, vocab_size is only {vocab_size}")
    normalizer = _normalizer()
    keys: dict[str, int] = {}
    token_map = np.empty(vocab_size, dtype=np.int32)
    for token_id in range(vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token_id)
        else:
            key = normalizer.normalize_str(text) or text
        token_map[token_id] = keys.setdefault(key, len(keys))
    return token_map


def engram_multipliers(
    layer_id: int, *, compressed_vocab_size: int, max_ngram_size: int
) -> NDArray[np.int64]:
    """Return the [max_ngram_size] odd multipliers of one layer; products with ids fit in int64."""
    bound = ((2**63 - 1) // compressed_vocab_size) // 2
    rng = np.random.default_rng(_LAYER_SEED * layer_id)
    return 2 * rng.integers(0, bound, size=max_ngram_size, dtype=np.int64) + 1


def engram_primes(
    *, num_layers: int, num_ngrams: int, num_heads: int, vocab_size: int
) -> NDArray[np.int64]:
    """Return [num_layers, num_ngrams, num_heads] int64: the primes from `vocab_size` on, each used once."""
    primes: list[int] = []
    candidate = vocab_size - 1
    while len(primes) < num_layers * num_ngrams * num_heads:
        candidate += 1
        if _is_prime(candidate):
            primes.append(candidate)
    return np.array(primes, dtype=np.int64).reshape(num_layers, num_ngrams, num_heads)


def engram_offsets(primes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [layers, columns] int64: first table row of each column, n-gram length major."""
    columns = primes.reshape(primes.shape[0], primes.shape[1] * primes.shape[2])
    return np.cumsum(columns, axis=1) - columns


def lookback_ids(
    compressed_ids: NDArray[np.int64],
    *,
    max_ngram_size: int,
    pad_compressed_id: int,
    is_image: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return [T, max_ngram_size] int64: the compressed ids at p, p-1, ..; blocked places hold the pad id.

    Args:
        compressed_ids: [T] ids of a sequence from its first token on.
        max_ngram_size: Longest n-gram.
        pad_compressed_id: Stands for everything before the start, and for all that lies at or before
            an image position.
        is_image: [T] positions inside an image span; None for text.
    """
    length = len(compressed_ids)
    result = np.full((length, max_ngram_size), pad_compressed_id, dtype=np.int64)
    visible = np.ones(length, dtype=np.bool_)
    for shift in range(max_ngram_size):
        visible[:shift] = False
        if is_image is not None:
            visible[shift:] &= ~is_image[: length - shift]
        shifted = np.roll(compressed_ids, shift)
        result[visible, shift] = shifted[visible]
    return result


def hash_rows(
    lookback: NDArray[np.int64],
    *,
    multipliers: NDArray[np.int64],
    primes: NDArray[np.int64],
    offsets: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return [T, columns] int64 table rows of one layer (model.md 7.2).

    Args:
        lookback: [T, N] from `lookback_ids`.
        multipliers: [N] of the layer.
        primes: [N - 1, heads] of the layer.
        offsets: [(N - 1) * heads] of the layer.
    """
    products = lookback * multipliers
    hashes = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]
    rows = hashes[:, :, None] % primes[None]
    return rows.reshape(len(lookback), -1) + offsets


def sequence_rows(
    constants: EngramConstants,
    token_ids: Sequence[int],
    is_image: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return [T, layers, columns] int64 table rows of a whole sequence: the oracle of faster versions."""
    compressed = constants.token_map[np.asarray(token_ids, dtype=np.int64)].astype(np.int64)
    lookback = lookback_ids(
        compressed,
        max_ngram_size=constants.multipliers.shape[1],
        pad_compressed_id=constants.pad_compressed_id,
        is_image=is_image,
    )
    rows = np.empty((len(lookback), *constants.offsets.shape), dtype=np.int64)
    for layer in range(len(constants.offsets)):
        rows[:, layer] = hash_rows(
            lookback,
            multipliers=constants.multipliers[layer],
            primes=constants.primes[layer],
            offsets=constants.offsets[layer],
        )
    return rows


def _normalizer() -> Any:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))
