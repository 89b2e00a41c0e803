"""Cached rows are shared: no hit ever changes them, whatever it replays, computes, drafts or decodes behind them."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from golden_runs import model
from model_runs import Pool, Request, merged_forward

if TYPE_CHECKING:
    from collections.abc import Sequence

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
WINDOW, VOCAB = 16, 500
PAGE_SIZE, LENGTH, NUM_SLOTS = 4, 144, 24
PREFIX_LEN, LONGEST_SUFFIX = 100, 30
#: Pages that are left for requests, so that inserting stops in time.
SPARE_PAGES = 150


class SharedPages:
    """A runner, prompts in its prefix cache, and the digest of every cached page when it was put there."""

    def __init__(self, *, num_prefixes: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = Pool(
            model(CHECKPOINT, "released"),
            num_requests=NUM_SLOTS,
            page_size=PAGE_SIZE,
            stale=True,
            length=LENGTH,
        )
        self.pool.slots = itertools.cycle(range(1, NUM_SLOTS + 1))
        self.digests: dict[int, bytes] = {}
        self.prefixes = [self.ids(PREFIX_LEN) for _ in range(num_prefixes)]
        self.num_left = (NUM_SLOTS + 1) * self.pool.num_columns
        for prefix in self.prefixes:
            request = Request(self.pool, prefix)
            merged_forward(self.pool, [request.prefill(PREFIX_LEN)])
            self.share(request)

    def ids(self, count: int) -> list[int]:
        ids: list[int] = self.rng.integers(3, VOCAB, count).tolist()
        return ids

    def share(self, request: Request) -> None:
        """Put a request's complete pages into the prefix cache; those that others do not use go back."""
        request.finish()
        pages = request.planner.pages
        num_whole = len(request.prompt) // PAGE_SIZE
        new = [page for page in pages[:num_whole] if page not in self.digests]
        self.digests |= dict(zip(new, self.page_digests(new), strict=True))
        self.num_left -= len(new)
        self.give_back(pages[num_whole:])

    def give_back(self, pages: Sequence[int]) -> None:
        self.pool.cache.free(np.array(pages, dtype=np.uint32))

    def page_digests(self, pages: Sequence[int]) -> list[bytes]:
        rows = [rows.numpy() for rows in self.pool.full_rows(pages).values()]
        return [
            hashlib.blake2b(b"".join(each[i].tobytes() for each in rows)).digest()
            for i in range(len(pages))
        ]

    def changed(self) -> list[int]:
        """Cached pages that are not what they were."""
        now = self.page_digests(list(self.digests))
        return [
            page
            for page, digest in zip(self.digests, now, strict=True)
            if digest != self.digests[page]
        ]

    def hit(self, *, is_shared: bool) -> None:
        """A request behind a random part of a cached prefix: prefill in random chunks, some decode steps.

        `is_shared`: its pages are cached, too, while there is room.
        """
        rng = self.rng
        prefix = self.prefixes[rng.integers(len(self.prefixes))]
        hit = PAGE_SIZE * int(rng.integers(1, PREFIX_LEN // PAGE_SIZE + 1))
        prompt = prefix[:hit] + self.ids(int(rng.integers(1, LONGEST_SUFFIX)))
        request = Request(self.pool, prompt, hit=hit, is_replay=bool(rng.integers(4)))
        while request.num_left:
            size = int(rng.integers(1, request.num_left + 1))
            if request.is_replay and request.num_left - size < WINDOW:
                size = request.num_left
            merged_forward(self.pool, [request.prefill(size)])
        for token in self.ids(int(rng.integers(3))):
            merged_forward(self.pool, [request.decode(token)])
        if is_shared and self.num_left > SPARE_PAGES:
            self.share(request)
        else:
            self.give_back(request.planner.pages[hit // PAGE_SIZE :])


@pytest.mark.parametrize(
    ("num_prefixes", "num_hits"), [(2, 12), pytest.param(6, 1000, marks=pytest.mark.slow)]
)
def test_no_random_hit_changes_a_cached_page(num_prefixes: int, num_hits: int) -> None:
    shared = SharedPages(num_prefixes=num_prefixes, seed=num_hits)
    num_first = len(shared.digests)
    for index in range(num_hits):
        shared.hit(is_shared=index % 6 == 0)
        assert shared.changed() == [], f"hit {index}"
    assert len(shared.digests) > num_first, "no page of a hit was ever cached"
