//! Components besides FULL: where a hit may end, who keeps the data, and what comes back.
#![allow(
    clippy::unwrap_used,
    reason = "test code; the exemption for tests knows test functions only"
)]

mod common;

use common::{put, take};
use dsserve_radix_cache::{
    CacheConfig, CacheError, Component, ComponentConfig, EvictionPolicy, InsertOptions, Inserted,
    KvEvent, Namespace, PageId, RadixCache, Retention, TailPages,
};

const WINDOW: Component = Component::Window;

fn plain() -> Namespace {
    Namespace::default()
}

/// Pages of 2 tokens, a window of 4 tokens on pages of 2.
fn windowed(num_pages: u32, num_window_pages: u32) -> RadixCache {
    let window = ComponentConfig::new(Retention::Trailing(4), 2, num_window_pages);
    RadixCache::new(CacheConfig::new(2, num_pages).with_component(WINDOW, window)).unwrap()
}

fn take_window(cache: &mut RadixCache, count: u32) -> Vec<PageId> {
    let mut pages = Vec::new();
    assert!(cache.allocate_component(WINDOW, count, &mut pages).unwrap());
    pages
}

/// Inserts new KV with window pages for its end; duplicates are freed.
fn put_with(cache: &mut RadixCache, tokens: &[u32], window: &[PageId]) -> Inserted {
    let pages = take(cache, u32::try_from(tokens.len()).unwrap() / 2);
    let tails = [TailPages {
        component: WINDOW,
        pages: window,
    }];
    let options = InsertOptions::default().with_tails(&tails);
    let inserted = cache
        .insert_with(&plain(), tokens, &pages, options)
        .unwrap();
    for replaced in &inserted.replaced {
        cache.free(&[replaced.own]);
    }
    for replaced in inserted.tails.iter().flat_map(|tail| &tail.replaced) {
        cache.free_component(WINDOW, &[replaced.own]).unwrap();
    }
    inserted
}

fn hit(cache: &RadixCache, tokens: &[u32]) -> u32 {
    cache.match_dry_run(&plain(), tokens)
}

#[test]
fn a_hit_ends_only_where_the_window_before_it_has_data() {
    let mut cache = windowed(16, 8);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    put(&mut cache, &plain(), &tokens);
    let found = cache.match_prefix(&plain(), &tokens);
    assert_eq!((found.cached_len, found.full_len), (0, 8));
    // A second request computes the same and brings the window of the branching point.
    let window = take_window(&mut cache, 2);
    put_with(&mut cache, &tokens[..6], &window);
    let found = cache.match_prefix(&plain(), &tokens);
    assert_eq!(
        (found.cached_len, found.full_len, found.pages.len()),
        (6, 8, 3)
    );
    let mut pages = Vec::new();
    assert_eq!(cache.tail_pages(found.node, WINDOW, &mut pages), Ok(2));
    assert_eq!(pages, window);
    cache.check_invariants().unwrap();
}

#[test]
fn a_prefix_shorter_than_the_window_needs_all_of_it() {
    let mut cache = windowed(16, 8);
    let window = take_window(&mut cache, 1);
    put_with(&mut cache, &[1, 2], &window);
    assert_eq!(hit(&cache, &[1, 2]), 2);
    put_with(&mut cache, &[3, 4, 5, 6], &window[..0]);
    assert_eq!(hit(&cache, &[3, 4, 5, 6]), 0);
}

#[test]
fn only_the_window_is_taken_and_duplicates_come_back() {
    let mut cache = windowed(16, 8);
    let first = take_window(&mut cache, 2);
    put_with(&mut cache, &[1, 2, 3, 4, 5, 6], &first);
    // Covers tokens 2..8: the page at 2..4 lies before the window, that at 4..6 is there already.
    let second = take_window(&mut cache, 3);
    let inserted = put_with(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8], &second);
    let outcome = &inserted.tails[0];
    assert_eq!((outcome.component, outcome.num_kept), (WINDOW, 1));
    let replaced: Vec<_> = outcome.replaced.iter().collect();
    assert_eq!(replaced.len(), 1);
    assert_eq!(
        (replaced[0].page_index, replaced[0].own, replaced[0].tree),
        (2, second[1], first[1])
    );
    let counts = cache.pool_counts(WINDOW).unwrap();
    assert_eq!((counts.num_held, counts.num_evictable), (1, 3));
    assert_eq!(hit(&cache, &[1, 2, 3, 4, 5, 6, 7, 8]), 8);
    cache.free_component(WINDOW, &second[..1]).unwrap();
    cache.check_invariants().unwrap();
}

#[test]
fn an_inner_node_becomes_a_tombstone_and_comes_back_to_life() {
    let mut cache = windowed(16, 8);
    let inner = take_window(&mut cache, 2);
    put_with(&mut cache, &[1, 2, 3, 4], &inner);
    let leaf = take_window(&mut cache, 2);
    put_with(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8], &leaf);
    cache.match_prefix(&plain(), &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(cache.evict_component(WINDOW, 1), Ok(2));
    assert_eq!(hit(&cache, &[1, 2, 3, 4, 9]), 0, "a tombstone");
    assert_eq!(
        hit(&cache, &[1, 2, 3, 4, 5, 6, 7, 8]),
        8,
        "FULL pages stayed"
    );
    let again = take_window(&mut cache, 2);
    let inserted = put_with(&mut cache, &[1, 2, 3, 4], &again);
    assert_eq!((inserted.reused_len, inserted.tails.len()), (4, 0));
    assert_eq!(hit(&cache, &[1, 2, 3, 4, 9]), 4);
    // The leaf goes as a whole, its FULL pages too.
    assert_eq!(cache.evict_component(WINDOW, 1), Ok(2));
    assert_eq!(
        (
            hit(&cache, &[1, 2, 3, 4, 5, 6, 7, 8]),
            cache.num_evictable()
        ),
        (4, 2)
    );
    cache.check_invariants().unwrap();
}

#[test]
fn an_ancestor_that_is_of_no_use_goes_with_its_last_leaf() {
    let mut cache = windowed(16, 8);
    put(&mut cache, &plain(), &[1, 2, 3, 4]);
    let window = take_window(&mut cache, 2);
    put_with(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8], &window);
    assert_eq!(cache.num_evictable(), 4);
    assert_eq!(
        cache.evict(1),
        4,
        "no hit may end at any part of what would be left"
    );
    cache.check_invariants().unwrap();
}

#[test]
fn a_cut_leaf_ends_where_a_hit_may_end() {
    let mut cache = windowed(16, 8);
    let window = take_window(&mut cache, 2);
    put_with(&mut cache, &[1, 2, 3, 4], &window);
    let window = take_window(&mut cache, 2);
    put_with(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], &window);
    assert_eq!(cache.evict(1), 4, "the leaf has one boundary, its end");
    assert_eq!(hit(&cache, &[1, 2, 3, 4, 5, 6]), 4);
}

#[test]
fn a_receipt_keeps_its_window_across_splits_until_it_lets_go() {
    let mut cache = windowed(16, 8);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    let early = take_window(&mut cache, 2);
    put_with(&mut cache, &tokens[..4], &early);
    let window = take_window(&mut cache, 2);
    let node = put_with(&mut cache, &tokens, &window).node;
    let receipt = cache.lock(node).unwrap();
    let counts = cache.pool_counts(WINDOW).unwrap();
    assert_eq!((counts.num_locked, counts.num_evictable), (2, 2));
    // Splits the locked node inside its window; the first part stays locked, too.
    let middle = take_window(&mut cache, 2);
    put_with(&mut cache, &tokens[..6], &middle);
    let counts = cache.pool_counts(WINDOW).unwrap();
    assert_eq!((counts.num_locked, counts.num_evictable), (2, 2));
    assert_eq!(
        cache.evict_component(WINDOW, 8),
        Ok(2),
        "what is not in the window went"
    );
    assert_eq!(hit(&cache, &tokens), 8);
    cache.check_invariants().unwrap();
    let receipt = cache.release_window(receipt);
    let receipt = cache.release_window(receipt);
    assert_eq!(cache.evict_component(WINDOW, 8), Ok(2));
    assert_eq!(
        (hit(&cache, &tokens), cache.evict(8)),
        (0, 0),
        "FULL pages are locked still"
    );
    cache.unlock(receipt);
    assert_eq!(cache.evict(8), 4);
    cache.check_invariants().unwrap();
}

#[test]
fn window_and_draft_must_agree() {
    let window = ComponentConfig::new(Retention::Trailing(2), 2, 8);
    let draft = ComponentConfig::new(Retention::Trailing(4), 1, 8);
    let config = CacheConfig::new(2, 16).with_component(WINDOW, window);
    let config = config.with_component(Component::Draft, draft);
    let mut cache = RadixCache::new(config).unwrap();
    let tokens = [1, 2, 3, 4, 5, 6];
    let mut bring = |end: usize, window: u32, draft: u32| {
        let pages = take(&mut cache, u32::try_from(end).unwrap() / 2);
        let (mut windows, mut drafts) = (Vec::new(), Vec::new());
        assert!(cache
            .allocate_component(WINDOW, window, &mut windows)
            .unwrap());
        let done = cache.allocate_component(Component::Draft, draft, &mut drafts);
        assert!(done.unwrap());
        let tails = [(WINDOW, &windows), (Component::Draft, &drafts)];
        let tails = tails.map(|(component, pages)| TailPages { component, pages });
        let options = InsertOptions::default().with_tails(&tails);
        let inserted = cache
            .insert_with(&plain(), &tokens[..end], &pages, options)
            .unwrap();
        for replaced in inserted.replaced {
            cache.free(&[replaced.own]);
        }
        cache.check_invariants().unwrap();
        cache.match_dry_run(&plain(), &tokens)
    };
    assert_eq!(bring(4, 1, 2), 0, "the draft lacks tokens 0..2");
    assert_eq!(bring(6, 1, 2), 6, "now 2..6 is there for both");
}

#[test]
fn data_of_a_path_component_is_needed_everywhere() {
    let config = ComponentConfig::new(Retention::Path, 2, 8);
    let config = CacheConfig::new(2, 16).with_component(Component::State, config);
    let mut cache = RadixCache::new(config).unwrap();
    let mut state = Vec::new();
    assert!(cache
        .allocate_component(Component::State, 3, &mut state)
        .unwrap());
    let mut insert = |end: usize, state: &[PageId]| {
        let pages = take(&mut cache, u32::try_from(end).unwrap() / 2);
        let tails = [TailPages {
            component: Component::State,
            pages: state,
        }];
        let options = InsertOptions::default().with_tails(&tails);
        let tokens = [1, 2, 3, 4, 5, 6];
        let inserted = cache
            .insert_with(&plain(), &tokens[..end], &pages, options)
            .unwrap();
        for replaced in inserted.replaced {
            cache.free(&[replaced.own]);
        }
        cache.match_dry_run(&plain(), &tokens)
    };
    assert_eq!(insert(4, &state[..1]), 0);
    assert_eq!(insert(2, &state[1..2]), 4);
    assert_eq!(insert(6, &state[2..]), 6);
}

#[test]
fn a_replayed_window_asks_for_a_longer_hit() {
    let replayed = ComponentConfig::new(Retention::None { replay_len: 4 }, 1, 1);
    let config = CacheConfig::new(2, 16).with_component(WINDOW, replayed);
    let mut cache = RadixCache::new(config).unwrap();
    put(&mut cache, &plain(), &[1, 2, 3, 4, 5, 6]);
    for (len, cached_len) in [(2, 0), (4, 0), (5, 0), (6, 6)] {
        let tokens = &[1, 2, 3, 4, 5, 6][..len];
        assert_eq!(hit(&cache, tokens), cached_len);
        assert_eq!(cache.match_prefix(&plain(), tokens).cached_len, cached_len);
    }
    let result = cache.evict_component(WINDOW, 1);
    assert_eq!(result, Err(CacheError::NoComponent { component: WINDOW }));
}

#[test]
fn a_refused_tail_changes_nothing() {
    let mut cache = windowed(16, 8);
    let own = take(&mut cache, 2);
    let window = take_window(&mut cache, 2);
    let foreign = [window[0], 8];
    let twice = [window[0], window[0]];
    let long = [window[0]; 3];
    let cases = [
        (WINDOW, &foreign[..], CacheError::PageNotHeld { page: 8 }),
        (WINDOW, &twice, CacheError::PageNotHeld { page: window[0] }),
        (
            WINDOW,
            &long,
            CacheError::TailMismatch {
                component: WINDOW,
                num_pages: 3,
                most: 2,
            },
        ),
        (
            Component::Draft,
            &window,
            CacheError::NoComponent {
                component: Component::Draft,
            },
        ),
    ];
    for (component, pages, error) in cases {
        let tails = [TailPages { component, pages }];
        let options = InsertOptions::default().with_tails(&tails);
        let result = cache.insert_with(&plain(), &[1, 2, 3, 4], &own, options);
        assert_eq!(result, Err(error));
        assert_eq!((cache.num_held(), cache.num_evictable()), (2, 0));
        assert_eq!(cache.pool_counts(WINDOW).unwrap().num_held, 2);
        cache.check_invariants().unwrap();
    }
}

#[test]
fn a_disabled_cache_frees_tails_too() {
    let window = ComponentConfig::new(Retention::Trailing(4), 2, 8);
    let config = CacheConfig::new(2, 8).with_component(WINDOW, window);
    let mut cache = RadixCache::new(config.with_enabled(false)).unwrap();
    let window = take_window(&mut cache, 2);
    put_with(&mut cache, &[1, 2, 3, 4], &window);
    assert_eq!(
        (
            cache.num_free(),
            cache.pool_counts(WINDOW).unwrap().num_free
        ),
        (8, 8)
    );
}

#[test]
fn long_chains_without_windows_are_quick() {
    let mut cache = windowed(4_096, 2);
    let tokens: Vec<u32> = (0..4_000).collect();
    let start = std::time::Instant::now();
    for end in (2..=tokens.len()).step_by(2) {
        put_with(&mut cache, &tokens[..end], &[]);
    }
    // A walk to the root for each node on the way to the root took half a minute.
    assert!(start.elapsed().as_secs() < 4, "{:?}", start.elapsed());
    assert_eq!(hit(&cache, &tokens), 0);
}

#[test]
fn a_component_goes_by_its_own_policy() {
    for (policy, goes_first) in [(EvictionPolicy::Lru, 2), (EvictionPolicy::Fifo, 1)] {
        let window = ComponentConfig::new(Retention::Trailing(4), 2, 8).with_policy(policy);
        let config = CacheConfig::new(2, 16).with_component(WINDOW, window);
        let mut cache = RadixCache::new(config).unwrap();
        for first in [1, 2] {
            let tail = take_window(&mut cache, 2);
            put_with(&mut cache, &[first, 3, 4, 5], &tail);
        }
        cache.match_prefix(&plain(), &[1, 3, 4, 5]);
        assert_eq!(cache.evict_component(WINDOW, 1), Ok(2));
        assert_eq!(hit(&cache, &[goes_first, 3, 4, 5]), 0, "{policy:?}");
        assert_eq!(hit(&cache, &[3 - goes_first, 3, 4, 5]), 4, "{policy:?}");
    }
}

#[test]
fn events_tell_at_which_boundaries_a_hit_may_end() {
    let window = ComponentConfig::new(Retention::Trailing(4), 2, 8);
    let config = CacheConfig::new(2, 16).with_component(WINDOW, window);
    let mut cache = RadixCache::new(config.with_events(4)).unwrap();
    let tail = take_window(&mut cache, 3);
    put_with(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8], &tail);
    let batch = cache.take_events(0).unwrap();
    let [KvEvent::BlockStored { trailing_ok, .. }] = &batch.events[..] else {
        panic!("one event, not {:?}", batch.events);
    };
    // The last window has its data from token 4 on: the page before it is the caller's again.
    assert_eq!(*trailing_ok, Some(vec![false, false, false, true]));
}

#[test]
#[should_panic(expected = "of another cache")]
fn a_receipt_of_another_cache_is_refused() {
    let mut ours = windowed(16, 8);
    let mut theirs = windowed(16, 8);
    let tail = take_window(&mut theirs, 1);
    let inserted = put_with(&mut theirs, &[1, 2], &tail);
    let tail = take_window(&mut ours, 1);
    put_with(&mut ours, &[3, 4], &tail);
    let receipt = theirs.lock(inserted.node).unwrap();
    ours.unlock(receipt);
}
