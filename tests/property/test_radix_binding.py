"""The radix cache through the extension: batches, tails, events, names; the same as single calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsserve import _native

PAGE = 4
PLAIN = _native.CacheNamespace()


def cache(**changes: Any) -> _native.RadixCache:
    return _native.RadixCache(**({"page_size": PAGE, "num_pages": 64} | changes))


def ids(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.uint32)


def take(tree: _native.RadixCache, count: int) -> np.ndarray:
    pages = tree.allocate(count)
    assert pages is not None
    return pages


def put(tree: _native.RadixCache, tokens: np.ndarray, **tails: np.ndarray) -> _native.CacheNode:
    pages = take(tree, len(tokens) // PAGE)
    node, _, replaced, outcomes = tree.insert_tails(PLAIN, tokens, pages, tails)
    tree.free(ids([own for _, own, _ in replaced]))
    for component, num_kept, doubles in outcomes:
        assert num_kept == 0
        tree.free_component(component, ids([own for _, own, _ in doubles]))
    return node


prompts = st.lists(
    st.lists(st.sampled_from([1, 1, 1, 2]), max_size=6).map(
        lambda symbols: ids([symbol for symbol in symbols for _ in range(PAGE)])
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(prompts)
def test_batches_give_what_single_calls_give(keys: list[np.ndarray]) -> None:
    single, batched = cache(), cache()
    rows = [[take(tree, len(key) // PAGE) for key in keys] for tree in (single, batched)]
    inserted = [single.insert(PLAIN, key, row) for key, row in zip(keys, rows[0], strict=True)]
    outcomes = batched.insert_batch(PLAIN, keys, rows[1])
    assert [one[1:] for one in outcomes] == [one[1:] for one in inserted]
    found = [single.match_prefix(PLAIN, key) for key in keys]
    lens, nodes, pages = batched.match_batch(PLAIN, keys)
    assert lens.tolist() == [one[0] for one in found] == [len(key) for key in keys]
    assert pages.tolist() == [page for one in found for page in one[2]]
    assert batched.match_dry_run_batch(PLAIN, keys).tolist() == lens.tolist()
    receipts = batched.lock_batch(nodes)
    locked = batched.num_locked
    assert locked == len(
        {tuple(key[:end]) for key in keys for end in range(PAGE, len(key) + 1, PAGE)}
    )
    batched.unlock_batch(receipts)
    assert batched.num_locked == 0
    batched.check_invariants()


def test_a_batch_that_cannot_be_locked_locks_nothing() -> None:
    tree = cache()
    gone = put(tree, ids([9] * PAGE))
    assert tree.evict(1) == 1
    kept = put(tree, ids([8] * PAGE))
    with pytest.raises(_native.CacheError, match="stale"):
        tree.lock_batch([kept, gone])
    assert tree.num_locked == 0
    with pytest.raises(ValueError, match="same length"):
        tree.insert_batch(PLAIN, [ids([8] * PAGE)], [])


def test_a_hit_ends_where_the_window_is() -> None:
    tree = cache(components={"window": (PAGE, PAGE, 4)})
    tokens = ids(list(range(3 * PAGE)))
    window = tree.allocate_component("window", 1)
    assert window is not None
    put(tree, tokens[: 2 * PAGE], window=window)
    put(tree, tokens)
    cached_len, node, _ = tree.match_prefix(PLAIN, tokens)
    assert cached_len == 2 * PAGE, "the last page has no window data"
    assert tree.tail_pages(node, "window").tolist() == window.tolist()
    receipt = tree.lock(node)
    assert tree.stats()["window"]["num_locked"] == 1
    assert tree.evict_component("window", 1) == 0
    tree.release_window(receipt)
    assert tree.evict_component("window", 1) == 1
    assert tree.match_dry_run(PLAIN, tokens) == 0
    tree.unlock(receipt)
    tree.check_invariants()


def test_events_are_numbered_and_can_be_replayed() -> None:
    tree = cache(event_batches=2)
    assert tree.take_events(0) is None
    tokens = ids(list(range(2 * PAGE)))
    put(tree, tokens)
    first = tree.take_events(5)
    assert first is not None
    sequence, timestamp_us, (stored,) = first
    assert (sequence, timestamp_us, stored["type"]) == (0, 5, "BlockStored")
    assert stored["token_ids"].tolist() == tokens.tolist()
    assert (stored["parent_block_hash"], stored["medium"]) == (None, "GPU")
    digests = tree.page_hashes(PLAIN, tokens)
    assert stored["block_hashes"] == [
        int.from_bytes(digest[:8], "big", signed=True) for digest in digests
    ]
    assert tree.evict(1) == 1
    second = tree.take_events(6)
    assert second is not None
    assert second[2] == [
        {"type": "BlockRemoved", "block_hashes": stored["block_hashes"][1:], "medium": "GPU"}
    ]
    assert [one["block_hashes"] for one in tree.snapshot_events()] == [stored["block_hashes"][:1]]
    assert tree.flush() == 1
    assert tree.take_events(7) == (2, 7, [{"type": "AllBlocksCleared"}])
    replayed = tree.replay_events(1)
    assert replayed is not None
    assert [sequence for sequence, _, _ in replayed] == [1, 2]
    assert tree.replay_events(0) is None
    assert tree.stats()["next_event_sequence"] == 3


def test_wrong_names_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="policy"):
        cache(policy="newest")
    with pytest.raises(ValueError, match="component"):
        cache(components={"full": (4, 4, 4)})
    with pytest.raises(_native.CacheError, match="page_tokens"):
        cache(components={"window": (4, 3, 4)})
    with pytest.raises(_native.CacheError, match="no data of component draft"):
        cache().allocate_component("draft", 1)


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "priority", "cost"])
def test_a_policy_decides_what_goes(policy: str) -> None:
    tree = cache(policy=policy, num_pages=3)
    urgent, hit, new = (ids([symbol] * PAGE) for symbol in (1, 2, 3))
    for tokens, priority in ((urgent, 7), (hit, None), (new, None)):
        tree.insert(PLAIN, tokens, take(tree, 1), priority=priority)
        if tokens is hit:
            tree.match_prefix(PLAIN, hit)
            tree.match_prefix(PLAIN, hit)
    assert tree.evict(1) == 1
    left = [tree.match_dry_run(PLAIN, tokens) > 0 for tokens in (urgent, hit, new)]
    goes = left.index(False)
    assert left.count(False) == 1
    assert goes == (1 if policy == "priority" else 0)


def test_a_row_of_all_components_is_allocated_and_inserted_in_one_call_each() -> None:
    tails = _native.CacheTails({"window": 2})
    key = ids([1] * (3 * PAGE))
    window = {"window": (2 * PAGE, PAGE, 64)}
    parts, rows = cache(components=window), cache(components=window)
    put(parts, key, window=_held(parts.allocate_component("window", 2)))
    row = _held(rows.allocate_row(3, tails))
    assert row.tolist() == [1, 2, 3, 1, 2]
    assert rows.allocate_row(1, _native.CacheTails({"window": 10_000})) is None, "all or nothing"
    assert rows.allocate_row(10_000, tails) is None
    everything = _native.CacheTails({"window": 2**32 - 1})
    assert rows.allocate_row(2**32 - 1, everything) is None, "more than any machine has"
    assert rows.insert_row(PLAIN, key, row, tails)[1:] == (0, [], [])
    assert rows.stats() == parts.stats()
    again = _held(rows.allocate_row(3, tails))
    _, reused, replaced, outcomes = rows.insert_row(PLAIN, key, again, tails)
    assert (reused, len(replaced)) == (3 * PAGE, 3)
    assert outcomes == [("window", 0, [(1, 3, 1), (2, 4, 2)])]
    rows.check_invariants()


def test_rows_that_do_not_fit_are_refused() -> None:
    tree = cache(components={"window": (2 * PAGE, PAGE, 64)})
    row = _held(tree.allocate_row(2, _native.CacheTails({"window": 1})))
    for count in (4, 2, 0):
        with pytest.raises(_native.CacheError):
            tree.insert_row(
                PLAIN, ids([1] * (2 * PAGE)), row, _native.CacheTails({"window": count})
            )
    with pytest.raises(_native.CacheError):
        tree.allocate_row(1, _native.CacheTails({"draft": 1}))
    assert tree.stats()["full"]["num_held"] == 2
    for name in ("full", "nothing"):
        with pytest.raises(ValueError, match="component"):
            _native.CacheTails({name: 1})


def _held(pages: np.ndarray | None) -> np.ndarray:
    assert pages is not None
    return pages
