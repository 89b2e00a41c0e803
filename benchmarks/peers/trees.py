"""The prefix cache as every implementation is driven, and ours behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from benchmarks.peers.rows import OURS
from benchmarks.peers.sizes import PAGE_SIZE, WINDOW
from dsserve._native import CacheNamespace, CacheTails, RadixCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

NAMESPACE = CacheNamespace()
TAIL = CacheTails({"window": WINDOW // PAGE_SIZE})


class PrefixCache(Protocol):
    """What the workloads call. `key` and `cached_len` are outside of the clock."""

    def key(self, tokens: NDArray[np.uint32]) -> Any:
        """Return a prompt in the form that the implementation takes."""

    def match(self, key: Any) -> Any:
        """Look a prompt up; the result goes to `insert`."""

    def cached_len(self, found: Any) -> int:
        """Return how many tokens of the prompt were cached."""

    def insert(self, key: Any, found: Any) -> None:
        """Insert the whole prompt."""

    def evict(self, num_tokens: int) -> None:
        """Make room."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    """An implementation of the prefix cache.

    Attributes:
        name: How it is called in the table.
        build: Builds one that holds so many tokens.
        has_window: A sliding window of 128 tokens is kept in the tree.
        is_whole_request: A match is an admission and an insert the end of a request.
    """

    name: str
    build: Callable[[int], PrefixCache]
    has_window: bool = False
    is_whole_request: bool = False


def our_kinds() -> list[CacheKind]:
    """Ours without and with a window."""
    return [
        CacheKind(OURS, OurCache),
        CacheKind(OURS, lambda tokens: OurCache(tokens, has_window=True), has_window=True),
    ]


class OurCache:
    """`dsserve._native.RadixCache`; its insert allocates the pages, builds the row of them, and frees doubles."""

    def __init__(
        self, num_tokens: int, *, has_window: bool = False, has_hashes: bool = False
    ) -> None:
        num_pages = num_tokens // PAGE_SIZE
        self._has_window = has_window
        self.cache = RadixCache(
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            components={"window": (WINDOW, PAGE_SIZE, num_pages)} if has_window else None,
            event_batches=1 if has_hashes else None,
        )

    def key(self, tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return a copy, as new in the caches as the peers' forms are."""
        return tokens.copy()

    def match(self, key: NDArray[np.uint32]) -> Any:
        """Length, node and pages."""
        return self.cache.match_prefix(NAMESPACE, key)

    def cached_len(self, found: Any) -> int:
        """The length."""
        return int(found[0])

    def insert(self, key: NDArray[np.uint32], found: Any) -> None:
        """Insert from the matched node on."""
        _, node, pages = found
        num_new = key.size // PAGE_SIZE - pages.size
        if not self._has_window:
            row = np.concatenate([pages, _held(self.cache.allocate(num_new))])
            _, _, replaced = self.cache.insert(NAMESPACE, key, row, start=node)
            self._free(replaced)
            return
        own = self.cache.allocate_row(num_new, TAIL)
        row = np.concatenate([pages, _held(own)])
        _, _, replaced, kept = self.cache.insert_row(NAMESPACE, key, row, TAIL, start=node)
        self._free(replaced)
        if kept:
            doubles = [own_page for _, _, twice in kept for _, own_page, _ in twice]
            self.cache.free_component("window", np.array(doubles, np.uint32))

    def _free(self, replaced: list[tuple[int, int, int]]) -> None:
        """Give back pages of what another prompt had inserted meanwhile."""
        if replaced:
            self.cache.free(np.array([own for _, own, _ in replaced], np.uint32))

    def evict(self, num_tokens: int) -> None:
        """Least recently used leaves."""
        self.cache.evict(num_tokens // PAGE_SIZE)


def _held(pages: NDArray[np.uint32] | None) -> NDArray[np.uint32]:
    if pages is None:
        raise RuntimeError("the pool is too small for the workload")
    return pages
