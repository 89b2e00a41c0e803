"""The prefix cache: conversations, system prompts, eviction, with and without a window; memory a token."""

from __future__ import annotations

import ctypes
import os
import statistics
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import OURS, Rows, clock_cost_ns, no_collection
from benchmarks.peers.sizes import PAGE_SIZE, VOCAB_SIZE, Sizes
from benchmarks.peers.trees import NAMESPACE, CacheKind, OurCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from benchmarks.peers.trees import PrefixCache

    Prompts = list[NDArray[np.uint32]]

LEAF = 512
SYSTEM_TOKENS, NUM_SYSTEMS = 2048, 32
BATCH = 32
#: Leaves from which on filling a cache takes so long that one round must do.
MANY_LEAVES = 20_000
MATCH_NS, BOTH_NS, PROMPT_US, EVICT_US, MEMORY_BYTES = 0.7, 1.5, 4.0, 20.0, 8.0
WINDOW_TIMES, GROWTH_TIMES = 1.2, 1.5
WINDOWED = ", window"
WHOLE = "match = admission, insert = end of the request"


def measure(kinds: Sequence[CacheKind], sizes: Sizes, rows: Rows) -> None:
    """Run everything; memory first, while the process is small."""
    _memory(kinds, sizes, rows)
    _chat(kinds, sizes, rows)
    _sysmix(kinds, sizes, rows)
    for leaves in sizes.leaves:
        _evict(kinds, leaves, sizes, rows)
    if sizes.leaves:
        _ratios(sizes, rows)


def _ids(random: np.random.Generator, count: int) -> NDArray[np.uint32]:
    return random.integers(0, VOCAB_SIZE, count, dtype=np.uint32)


def _suffix(kind: CacheKind) -> str:
    return WINDOWED if kind.has_window else ""


def _evict_name(leaves: int) -> str:
    return f"evict 512 + match + insert, {leaves:,} leaves"


def _note(kind: CacheKind, hits: Sequence[int] = (), num_tokens: int = 0) -> str:
    parts = [WHOLE] if kind.is_whole_request else []
    if num_tokens:
        parts.append(f"{sum(hits) / num_tokens:.1%} of the tokens hit")
    return "; ".join(parts)


def _bar(kind: CacheKind, value: float) -> float | None:
    return None if kind.has_window else value


def _in_turn(kinds: Sequence[CacheKind], number: int) -> list[CacheKind]:
    """Let another one begin in each round: the first finds memory and caches as others left them."""
    first = number % len(kinds)
    return [*kinds[first:], *kinds[:first]]


def _chat(kinds: Sequence[CacheKind], sizes: Sizes, rows: Rows) -> None:
    prompts = _conversations(sizes)
    num_tokens = sum(prompt.size for prompt in prompts)
    pool = sizes.conversations * sizes.chat_tokens + PAGE_SIZE * 4 * sizes.conversations
    hits: dict[str, list[int]] = {}
    for number in range(sizes.rounds):
        for kind in _in_turn(kinds, number):
            timings, hit = _turns(kind.build(pool), prompts)
            if not kind.has_window:
                hits[kind.name] = hit
            match_ns, insert_ns = (float(value) / num_tokens for value in timings.sum(axis=0))
            for name, value, bar in (
                ("match", match_ns, MATCH_NS),
                ("match + insert", match_ns + insert_ns, BOTH_NS),
            ):
                rows.add(
                    f"chat {name}{_suffix(kind)}",
                    "ns/token",
                    kind.name,
                    value,
                    bar=_bar(kind, bar),
                    note=_note(kind, hit, num_tokens),
                )
    for name, hit in hits.items():
        if hit != hits[OURS]:
            raise RuntimeError(f"{name} found other prefixes than ours")


def _conversations(sizes: Sizes) -> Prompts:
    random = np.random.default_rng(0)
    system = _ids(random, sizes.turn_tokens)
    texts = [
        np.concatenate([system, _ids(random, sizes.chat_tokens - system.size)])
        for _ in range(sizes.conversations)
    ]
    ends = range(2 * sizes.turn_tokens, sizes.chat_tokens + 1, sizes.turn_tokens)
    return [text[:end] for end in ends for text in texts]


def _turns(cache: PrefixCache, prompts: Prompts) -> tuple[NDArray[np.float64], list[int]]:
    """Return [turns, (match, insert)] in ns, and the hits."""
    clock = time.thread_time_ns
    timings = np.empty((len(prompts), 2))
    hits = []
    with no_collection():
        for turn, prompt in enumerate(prompts):
            key = cache.key(prompt)
            started = clock()
            found = cache.match(key)
            matched = clock()
            cache.insert(key, found)
            timings[turn] = matched - started, clock() - matched
            hits.append(cache.cached_len(found))
    return np.maximum(timings - clock_cost_ns(), 0), hits


def _sysmix(kinds: Sequence[CacheKind], sizes: Sizes, rows: Rows) -> None:
    random = np.random.default_rng(1)
    systems = [_ids(random, SYSTEM_TOKENS) for _ in range(NUM_SYSTEMS)]
    weights = 1 / np.arange(1, NUM_SYSTEMS + 1)
    chosen = random.choice(NUM_SYSTEMS, sizes.sysmix_prompts, p=weights / weights.sum())
    prompts = [np.concatenate([systems[number], _ids(random, LEAF)]) for number in chosen]
    num_tokens = sum(prompt.size for prompt in prompts)
    pool = (sizes.sysmix_prompts + 8 * NUM_SYSTEMS) * LEAF
    for number in range(sizes.rounds):
        for kind in _in_turn(kinds, number):
            timings, hit = _turns(kind.build(pool), prompts)
            match_us, insert_us = (float(value) / 1e3 for value in np.median(timings, axis=0))
            for name, value, bar in (("match", match_us, PROMPT_US), ("insert", insert_us, None)):
                rows.add(
                    f"sysmix {name}{_suffix(kind)}",
                    "us",
                    kind.name,
                    value,
                    bar=None if bar is None else _bar(kind, bar),
                    note=_note(kind, hit, num_tokens),
                )
        rows.add("sysmix match", "us", f"{OURS}, {BATCH} a call", _batched(pool, prompts))


def _batched(pool: int, prompts: Prompts) -> float:
    """Return us a prompt when prompts are matched in one call."""
    ours = OurCache(pool)
    samples = []
    with no_collection():
        for first in range(0, len(prompts), BATCH):
            batch = [prompt.copy() for prompt in prompts[first : first + BATCH]]
            started = time.thread_time_ns()
            ours.cache.match_batch(NAMESPACE, batch)
            samples.append((time.thread_time_ns() - started) / 1e3 / len(batch))
            for prompt in batch:
                ours.insert(prompt, ours.match(prompt))
    return statistics.median(samples)


def _evict(kinds: Sequence[CacheKind], leaves: int, sizes: Sizes, rows: Rows) -> None:
    for number in range(1 if leaves >= MANY_LEAVES else sizes.rounds):
        for kind in _in_turn(kinds, number):
            samples = _replacements(kind.build(leaves * LEAF), leaves, sizes)
            rows.add(
                _evict_name(leaves) + _suffix(kind),
                "us",
                kind.name,
                statistics.median(samples) / 1e3,
                bar=_bar(kind, EVICT_US),
                note=_note(kind),
            )


def _replacements(cache: PrefixCache, leaves: int, sizes: Sizes) -> list[float]:
    """Fill a cache, then measure prompts that each take the place of another; ns each."""
    random = np.random.default_rng(2)
    for _ in range(leaves):
        key = cache.key(_ids(random, LEAF))
        cache.insert(key, cache.match(key))
    clock = time.thread_time_ns
    samples: list[float] = []
    cost = clock_cost_ns()
    with no_collection():
        finish = clock() + sizes.evict_cpu_s * 1e9
        while len(samples) < sizes.evictions and (len(samples) < 20 or clock() < finish):
            key = cache.key(_ids(random, LEAF))
            started = clock()
            cache.evict(LEAF)
            found = cache.match(key)
            cache.insert(key, found)
            samples.append(clock() - started - cost)
            if cache.cached_len(found):
                raise RuntimeError("an unrelated prompt was found")
    return samples


def _ratios(sizes: Sizes, rows: Rows) -> None:
    """Add what a window costs on top, and how eviction grows with the leaves, within each implementation."""
    values = {(row.workload, row.implementation): row.value for row in rows.all()}
    for (workload, name), value in values.items():
        plain = values.get((workload.removesuffix(WINDOWED), name))
        # With a window the prompts of `sysmix` share nothing: no prompt ends where they part.
        if workload.endswith(WINDOWED) and plain and not workload.startswith("sysmix"):
            label = f"window on top, {workload.removesuffix(WINDOWED)}"
            rows.add(label, "times", name, value / plain, bar=WINDOW_TIMES)
    least, most = (_evict_name(leaves) for leaves in (min(sizes.leaves), max(sizes.leaves)))
    for name in [name for workload, name in values if workload == most]:
        growth = values[most, name] / values[least, name]
        rows.add("evict, most leaves over least", "times", name, growth, bar=GROWTH_TIMES)


def _memory(kinds: Sequence[CacheKind], sizes: Sizes, rows: Rows) -> None:
    builders: list[tuple[str, Callable[[int], PrefixCache]]] = [
        (kind.name, kind.build) for kind in kinds if not kind.has_window
    ]
    builders.append(
        (f"{OURS}, page hashes", lambda tokens: OurCache(tokens, has_hashes=True)),
    )
    for name, build in builders:
        value = _in_child(lambda build=build: _grown_bytes(build, sizes))  # type: ignore[misc]
        rows.add("memory a cached token", "bytes", name, value, bar=MEMORY_BYTES)


def _grown_bytes(build: Callable[[int], PrefixCache], sizes: Sizes) -> float:
    """Return resident bytes a token of unrelated prompts, without what a full pool takes anyway."""
    random = np.random.default_rng(3)
    num_tokens = sizes.memory_prompts * LEAF
    cache = build(num_tokens + 64 * LEAF)
    before = 0
    for number in range(sizes.memory_prompts + 8):
        if number == 8:  # what the first calls load is not counted, nor may it hide what follows
            ctypes.CDLL(None).malloc_trim(0)
            before = _resident_bytes()
        key = cache.key(_ids(random, LEAF))
        cache.insert(key, cache.match(key))
        if isinstance(cache, OurCache) and number % 64 == 0:
            cache.cache.take_events(number)
    return (_resident_bytes() - before) / num_tokens


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _in_child(work: Callable[[], float]) -> float:
    """Return the result of `work` in a process of its own, so that memory freed before is not reused."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, struct.pack("d", work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if len(answer) != struct.calcsize("d"):
        raise RuntimeError("the process that measured memory gave no result")
    return float(struct.unpack("d", answer)[0])
