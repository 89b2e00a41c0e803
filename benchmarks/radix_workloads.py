"""What does the prefix cache cost through the extension, on the workloads of the peer comparison?

`chat`: 8 conversations with one system prompt of 4,096 tokens grow by 4,096 a turn to 131,072. `sysmix`:
prompts of one of 32 system prompts (2,048 tokens, Zipf) and 512 own tokens. `evict`: a full cache of
unrelated 512-token prompts; each new one takes the place of the oldest. Every turn matches, locks,
evicts if needed, allocates, inserts and unlocks, in single calls. Of each turn the best of three runs
counts; `+window` keeps a sliding window of 128 tokens in the tree.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.record import Figure
from dsserve._native import CacheNamespace, CacheTails, RadixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Prompts = Callable[[np.random.Generator], Iterator[NDArray[np.uint32]]]

PAGE_SIZE = 64
WINDOW = 128
VOCAB = 129_280
ROUNDS = 3
NAMESPACE = CacheNamespace()
TAIL = CacheTails({"window": WINDOW // PAGE_SIZE})
CHAT_MATCH_NS, CHAT_BOTH_NS, PROMPT_US, EVICT_US = 0.7, 1.5, 4.0, 20.0
FLAT_RATIO, WINDOW_RATIO, HASH_NS = 1.5, 1.2, {64: 4.5, 256: 3.3}
LEAVES = (1024, 8192, 65_536)


def measure() -> list[Figure]:
    """Run all workloads; the ratios compare runs of this process."""
    settings = {"page_size": PAGE_SIZE, "best_of": ROUNDS}
    figures = []
    plain_us: dict[str, float] = {}
    for suffix, has_window in (("", False), ("+window", True)):
        chat, tokens = _best(_chat, 1 << 20, 0, has_window=has_window)
        figures += [
            _figure(
                f"radix.chat_match{suffix}",
                "ns/token",
                chat[:, 0].sum() / tokens,
                CHAT_MATCH_NS,
                settings,
            ),
            _figure(
                f"radix.chat_match_insert{suffix}",
                "ns/token",
                chat[:, [0, 2]].sum() / tokens,
                CHAT_BOTH_NS,
                settings,
            ),
        ]
        turns = {"chat": chat.sum(1).mean() / 1e3}
        sysmix, _ = _best(_sysmix, 4 << 20, 0, has_window=has_window)
        figures.append(
            _figure(
                f"radix.match_2560{suffix}", "us", sysmix[:, 0].mean() / 1e3, PROMPT_US, settings
            )
        )
        for leaves in LEAVES:
            evict, _ = _best(_unrelated(leaves + 5000), leaves * 512, leaves, has_window=has_window)
            turns[f"evict_{leaves}"] = evict.sum(1).mean() / 1e3
            figures.append(
                _figure(
                    f"radix.evict_{leaves}{suffix}",
                    "us",
                    turns[f"evict_{leaves}"],
                    EVICT_US,
                    settings,
                )
            )
        if has_window:
            ratios = {f"radix.window_ratio_{name}": turns[name] / plain_us[name] for name in turns}
            figures += [
                _figure(name, "ratio", value, WINDOW_RATIO, settings)
                for name, value in ratios.items()
            ]
        else:
            plain_us = turns
            ratio = turns[f"evict_{LEAVES[-1]}"] / turns[f"evict_{LEAVES[0]}"]
            figures.append(_figure("radix.evict_growth", "ratio", ratio, FLAT_RATIO, settings))
    return figures + [_hashes(page_size) for page_size in HASH_NS]


def _figure(name: str, unit: str, value: float, bar: float, settings: dict[str, Any]) -> Figure:
    return Figure(name, unit, float(value), None, None, 1, bar=bar, settings=settings)


def _best(
    prompts: Prompts, pool_tokens: int, num_warm: int, *, has_window: bool
) -> tuple[NDArray[np.int64], int]:
    """Return [turns, (match, evict, the rest)] in ns without the first turns, and the tokens looked up."""
    rounds = []
    num_tokens = 0
    for _ in range(ROUNDS):
        num_pages = pool_tokens // PAGE_SIZE
        components = {"window": (WINDOW, PAGE_SIZE, num_pages)} if has_window else None
        cache = RadixCache(page_size=PAGE_SIZE, num_pages=num_pages, components=components)
        turns = []
        num_tokens = 0
        for tokens in prompts(np.random.default_rng(0)):
            turns.append(_turn(cache, tokens, has_window=has_window))
            num_tokens += tokens.size
        cache.check_invariants()
        rounds.append(turns[num_warm:])
    return np.array(rounds, np.int64).min(axis=0), num_tokens


def _turn(
    cache: RadixCache, tokens: NDArray[np.uint32], *, has_window: bool
) -> tuple[int, int, int]:
    clock = time.perf_counter_ns
    num_pages = tokens.size // PAGE_SIZE
    start = clock()
    _, node, pages = cache.match_prefix(NAMESPACE, tokens)
    matched = clock()
    receipt = cache.lock(node)
    shortage = num_pages - pages.size - cache.num_free
    before = clock()
    if shortage > 0:
        cache.evict(shortage)
    after = clock()
    num_new = num_pages - pages.size
    if has_window:
        row = np.concatenate([pages, _held(cache.allocate_row(num_new, TAIL))])
        _, _, _, left = cache.insert_row(NAMESPACE, tokens, row, TAIL, start=node)
        for _, _, doubles in left:
            cache.free_component("window", np.array([own for _, own, _ in doubles], np.uint32))
    else:
        row = np.concatenate([pages, _held(cache.allocate(num_new))])
        cache.insert(NAMESPACE, tokens, row, start=node)
    cache.unlock(receipt)
    end = clock()
    return matched - start, after - before, (before - matched) + (end - after)


def _held(pages: NDArray[np.uint32] | None) -> NDArray[np.uint32]:
    if pages is None:
        raise RuntimeError("the pool is too small for the workload")
    return pages


def _ids(rng: np.random.Generator, count: int) -> NDArray[np.uint32]:
    return rng.integers(0, VOCAB, count, dtype=np.uint32)


def _chat(rng: np.random.Generator) -> Iterator[NDArray[np.uint32]]:
    system = _ids(rng, 4096)
    conversations = [np.concatenate([system, _ids(rng, 126_976)]) for _ in range(8)]
    for end in range(8192, 131_073, 4096):
        yield from (conversation[:end] for conversation in conversations)


def _sysmix(rng: np.random.Generator) -> Iterator[NDArray[np.uint32]]:
    systems = [_ids(rng, 2048) for _ in range(32)]
    weights = 1 / np.arange(1, 33)
    for number in rng.choice(32, 5000, p=weights / weights.sum()):
        yield np.concatenate([systems[number], _ids(rng, 512)])


def _unrelated(count: int) -> Prompts:
    return lambda rng: (_ids(rng, 512) for _ in range(count))


def _hashes(page_size: int) -> Figure:
    cache = RadixCache(page_size=page_size, num_pages=1)
    tokens = _ids(np.random.default_rng(0), 131_072)
    samples = []
    for _ in range(40):
        start = time.perf_counter_ns()
        cache.page_hashes(NAMESPACE, tokens)
        samples.append((time.perf_counter_ns() - start) / tokens.size)
    settings = {"page_size": page_size, "best_of": len(samples)}
    return _figure(
        f"radix.page_hash_{page_size}", "ns/token", min(samples), HASH_NS[page_size], settings
    )
