"""How long does it take to match a cached prompt of 131,072 tokens?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.record import Figure, timing
from dsserve._native import CacheNamespace, RadixCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKENS = 131072
PAGE_SIZE = 64
WARM_UP = 20
SAMPLES = 200
#: Read between two samples, so that tokens come from memory as for a prompt that just arrived.
CACHE_SWEEP_BYTES = 1 << 26
BAR_US = 300.0


def measure() -> list[Figure]:
    """Match the same long prompt, and one that leaves it in the middle, among other cached prompts."""
    random = np.random.default_rng(0)
    cache = RadixCache(page_size=PAGE_SIZE, num_pages=3 * TOKENS // PAGE_SIZE)
    namespace = CacheNamespace()
    prompts = random.integers(0, 129280, size=(2, TOKENS), dtype=np.uint32)
    forked = prompts[0].copy()
    forked[TOKENS // 2 :] = random.integers(0, 129280, size=TOKENS // 2, dtype=np.uint32)
    for prompt in prompts:
        pages = cache.allocate(TOKENS // PAGE_SIZE)
        if pages is None:
            raise RuntimeError("the pool is too small for the prompts")
        cache.insert(namespace, prompt, pages)
    settings = {"tokens": TOKENS, "page_size": PAGE_SIZE, "cpu_caches": "cold"}
    return [
        timing(
            f"radix.match_{name}",
            _match(cache, namespace, prompt, expected),
            bar_us=BAR_US,
            settings=settings | {"cached_len": expected},
        )
        for name, prompt, expected in (
            ("whole", prompts[0], TOKENS),
            ("half", forked, TOKENS // 2),
        )
    ]


def _match(
    cache: RadixCache, namespace: CacheNamespace, prompt: NDArray[np.uint32], expected: int
) -> list[float]:
    samples = []
    sweep = np.ones(CACHE_SWEEP_BYTES // 8)
    for _ in range(WARM_UP + SAMPLES):
        sweep.sum()
        started = time.perf_counter_ns()
        cached_len, _, _ = cache.match_prefix(namespace, prompt)
        samples.append((time.perf_counter_ns() - started) / 1e3)
        if cached_len != expected:
            raise RuntimeError(f"matched {cached_len} tokens, expected {expected}")
    return samples[WARM_UP:]
