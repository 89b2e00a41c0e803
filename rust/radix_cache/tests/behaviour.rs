//! Single behaviours of the cache, each told by its name.

mod common;

use common::{namespaces, new_cache, put, take};
use dsserve_radix_cache::{
    CacheConfig, CacheError, Component, ComponentConfig, Namespace, RadixCache, Retention,
};

fn plain() -> Namespace {
    Namespace::default()
}

#[test]
fn config_with_a_wrong_value_is_refused_by_name() {
    let good = CacheConfig::new(4, 8);
    let window = |retention, page_tokens, num_pages| {
        let config = ComponentConfig::new(retention, page_tokens, num_pages);
        good.with_component(Component::Window, config)
    };
    let trailing = Retention::Trailing(8);
    let cases = [
        (CacheConfig::new(0, 8), "page_size"),
        (CacheConfig::new(6, 8), "page_size"),
        (CacheConfig::new(4, 0), "num_pages"),
        // Few pages: were this accepted, it should not fill the machine.
        (CacheConfig::new(1 << 31, 2), "num_pages"),
        (window(trailing, 8, 4), "page_tokens"),
        (window(trailing, 3, 4), "page_tokens"),
        (window(trailing, 0, 4), "page_tokens"),
        (window(trailing, 4, 0), "num_pages of a component"),
        (window(Retention::Trailing(0), 4, 4), "trailing"),
    ];
    for (config, name) in cases {
        match RadixCache::new(config) {
            Err(CacheError::InvalidConfig { field, .. }) => assert_eq!(field, name),
            other => panic!("{config:?} gave {other:?}"),
        }
    }
    assert_eq!(RadixCache::new(good).unwrap().config(), good);
}

#[test]
fn only_whole_pages_are_found() {
    let mut cache = new_cache(4, 8);
    let tokens: Vec<u32> = (0..12).collect();
    let pages = put(&mut cache, &plain(), &tokens[..8]);
    assert_eq!(pages, [1, 2]);
    for (len, expected) in [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (12, 8)] {
        let found = cache.match_prefix(&plain(), &tokens[..len]);
        assert_eq!(found.cached_len, expected, "{len} tokens");
        assert_eq!(found.pages, pages[..expected as usize / 4]);
        assert_eq!(cache.prefix_len(found.node), Ok(expected));
    }
}

#[test]
fn namespaces_share_nothing() {
    let mut cache = new_cache(2, 64);
    let names = namespaces();
    let mut all = Vec::new();
    for (done, name) in names.iter().enumerate() {
        for (other, held) in names.iter().zip([4; 8]) {
            let is_filled = names[..done].contains(other);
            let expected = if is_filled { held } else { 0 };
            assert_eq!(cache.match_dry_run(other, &[1, 2, 3, 4]), expected);
        }
        all.extend(put(&mut cache, name, &[1, 2, 3, 4]));
    }
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 2 * names.len(), "no page serves two namespaces");
    cache.check_invariants().unwrap();
}

#[test]
fn a_node_of_another_namespace_or_path_is_no_start() {
    let mut cache = new_cache(2, 16);
    put(&mut cache, &plain(), &[1, 2, 3, 4]);
    put(&mut cache, &namespaces()[1], &[1, 2, 3, 4]);
    let own = cache.match_prefix(&plain(), &[1, 2, 3, 4]).node;
    let pages = take(&mut cache, 3);
    let not_on_path = Err(CacheError::NotOnPath { node_pages: 2 });
    let other = cache.insert_at(&namespaces()[1], own, &[1, 2, 3, 4, 5, 6], &pages);
    assert_eq!(other, not_on_path);
    let unknown = cache.insert_at(&namespaces()[2], own, &[1, 2, 3, 4, 5, 6], &pages);
    assert_eq!(unknown, not_on_path);
    let differs = cache.insert_at(&plain(), own, &[1, 2, 3, 9, 5, 6], &pages);
    assert_eq!(differs, not_on_path);
    let too_short = cache.insert_at(&plain(), own, &[1, 2], &pages[..1]);
    assert_eq!(too_short, not_on_path);
    cache.free(&pages);
}

#[test]
fn insert_at_looks_at_new_tokens_only() {
    let mut cache = new_cache(2, 16);
    put(&mut cache, &plain(), &[1, 2, 3, 4]);
    let from = cache.match_prefix(&plain(), &[1, 2, 3, 4]).node;
    let new = take(&mut cache, 1);
    // The first pages of row and key are not looked at.
    let inserted = cache
        .insert_at(&plain(), from, &[0, 0, 3, 4, 5, 6], &[0, 0, new[0]])
        .unwrap();
    assert_eq!((inserted.reused_len, inserted.replaced.len()), (4, 0));
    let found = cache.match_prefix(&plain(), &[1, 2, 3, 4, 5, 6]);
    assert_eq!((found.cached_len, found.node), (6, inserted.node));
}

#[test]
fn what_was_inserted_meanwhile_is_found_from_the_empty_node() {
    let mut cache = new_cache(2, 16);
    let nothing = cache.match_prefix(&plain(), &[1, 2, 3, 4]);
    let receipt = cache.lock(nothing.node).unwrap();
    let first = put(&mut cache, &plain(), &[1, 2]);
    let pages = take(&mut cache, 2);
    let inserted = cache
        .insert_at(&plain(), receipt.node(), &[1, 2, 3, 4], &pages)
        .unwrap();
    assert_eq!(inserted.reused_len, 2);
    assert_eq!(inserted.replaced.len(), 1);
    assert_eq!(
        (inserted.replaced[0].own, inserted.replaced[0].tree),
        (pages[0], first[0])
    );
    cache.unlock(receipt);
    cache.free(&pages[..1]);
    cache.check_invariants().unwrap();
}

#[test]
fn locks_survive_a_split_on_both_parts() {
    let mut cache = new_cache(1, 8);
    put(&mut cache, &plain(), &[1, 2, 3, 4, 5]);
    let whole = cache.match_prefix(&plain(), &[1, 2, 3, 4, 5]);
    let long = cache.lock(whole.node).unwrap();
    let head = cache.match_prefix(&plain(), &[1, 2]);
    let short = cache.lock(head.node).unwrap();
    assert_eq!((cache.num_locked(), cache.evict(8)), (5, 0));
    cache.unlock(long);
    assert_eq!((cache.num_locked(), cache.num_evictable()), (2, 3));
    cache.check_invariants().unwrap();
    assert_eq!(cache.evict(2), 2, "the end of the tail went");
    assert_eq!(cache.match_dry_run(&plain(), &[1, 2, 3, 4]), 3);
    assert_eq!(cache.evict(2), 1, "the head is locked");
    cache.unlock(short);
    assert_eq!((cache.num_locked(), cache.evict(8)), (0, 2));
    cache.check_invariants().unwrap();
}

#[test]
fn the_least_recently_used_leaf_goes_first() {
    let mut cache = new_cache(1, 8);
    for leaf in [[1, 2], [3, 4], [5, 6], [7, 8]] {
        put(&mut cache, &plain(), &leaf);
    }
    assert_eq!(cache.match_prefix(&plain(), &[1, 2]).cached_len, 2);
    assert_eq!(
        cache.match_dry_run(&plain(), &[3, 4]),
        2,
        "a dry run does not count as use"
    );
    let locked = cache.match_prefix(&plain(), &[5, 6]).node;
    let receipt = cache.lock(locked).unwrap();
    let left = |cache: &RadixCache| -> Vec<u32> {
        (1..8)
            .step_by(2)
            .filter(|&first| cache.match_dry_run(&plain(), &[first, first + 1]) > 0)
            .collect()
    };
    assert_eq!((cache.evict(2), left(&cache)), (2, vec![1, 5, 7]));
    assert_eq!((cache.evict(2), left(&cache)), (2, vec![1, 5]));
    cache.unlock(receipt);
    assert_eq!(
        (cache.evict(2), left(&cache)),
        (2, vec![5]),
        "unlocking is a use"
    );
    assert_eq!((cache.evict(0), cache.evict(9), cache.evict(1)), (0, 2, 0));
}

#[test]
fn a_parent_goes_by_its_own_last_use_once_its_children_went() {
    let mut cache = new_cache(1, 8);
    put(&mut cache, &plain(), &[1, 2]);
    put(&mut cache, &plain(), &[1, 3]);
    put(&mut cache, &plain(), &[9]);
    cache.match_prefix(&plain(), &[1]);
    assert_eq!(cache.evict(1), 1);
    assert_eq!(
        cache.match_dry_run(&plain(), &[1, 2]),
        1,
        "the oldest child went"
    );
    assert_eq!(cache.match_dry_run(&plain(), &[1, 3]), 2);
    assert_eq!(cache.evict(1), 1);
    assert_eq!(cache.match_dry_run(&plain(), &[1, 3]), 1);
    assert_eq!(cache.evict(1), 1);
    assert_eq!(
        cache.match_dry_run(&plain(), &[9]),
        0,
        "the parent was used after this leaf"
    );
    assert_eq!(cache.match_dry_run(&plain(), &[1]), 1);
}

#[test]
fn a_refused_insert_changes_nothing() {
    let mut cache = new_cache(2, 8);
    let tree = put(&mut cache, &plain(), &[1, 2, 3, 4, 5, 6]);
    let own = take(&mut cache, 2);
    let key = [1, 2, 3, 4, 8, 8, 9, 9];
    let cases = [
        ([tree[0], tree[1], own[0], 0], 0),
        ([tree[0], tree[1], own[0], own[0]], own[0]),
        ([tree[0], tree[1], own[0], tree[2]], tree[2]),
        ([tree[0], tree[0], own[0], own[1]], tree[0]),
        ([tree[0], 7, own[0], own[1]], 7),
        ([tree[0], own[0], own[0], own[1]], own[0]),
        ([tree[0], 99, own[0], own[1]], 99),
    ];
    for (row, page) in cases {
        assert_eq!(
            cache.insert(&plain(), &key, &row),
            Err(CacheError::PageNotHeld { page })
        );
        assert_eq!(
            cache.insert(&namespaces()[1], &[1, 2], &[0]).unwrap_err(),
            CacheError::PageNotHeld { page: 0 }
        );
        assert_eq!((cache.num_held(), cache.num_evictable()), (2, 3));
        assert_eq!(cache.match_dry_run(&plain(), &key), 4);
        cache.check_invariants().unwrap();
    }
    cache
        .insert(&plain(), &key, &[tree[0], tree[1], own[0], own[1]])
        .unwrap();
}

#[test]
fn flush_is_refused_while_anything_is_locked() {
    let mut cache = new_cache(1, 4);
    put(&mut cache, &plain(), &[1, 2]);
    let node = cache.match_prefix(&plain(), &[1]).node;
    let receipt = cache.lock(node).unwrap();
    let empty = cache.match_prefix(&namespaces()[1], &[1]).node;
    let second = cache.lock(empty).unwrap();
    let locked = |num_receipts, num_pages| {
        Err(CacheError::Locked {
            num_receipts,
            num_pages,
        })
    };
    assert_eq!(cache.flush(), locked(2, 1));
    cache.unlock(receipt);
    assert_eq!(cache.flush(), locked(1, 0));
    cache.unlock(second);
    assert_eq!(cache.flush(), Ok(2));
    assert_eq!((cache.num_free(), cache.flush()), (4, Ok(0)));
    assert!(matches!(
        cache.lock(node),
        Err(CacheError::StaleHandle { .. })
    ));
    cache.check_invariants().unwrap();
}

#[test]
fn a_disabled_cache_finds_nothing_and_frees_what_it_gets() {
    let mut cache = RadixCache::new(CacheConfig::new(2, 4).with_enabled(false)).unwrap();
    let pages = take(&mut cache, 2);
    let inserted = cache.insert(&plain(), &[1, 2, 3, 4], &pages).unwrap();
    assert_eq!((inserted.reused_len, inserted.replaced.len()), (0, 0));
    assert_eq!((cache.num_free(), cache.num_evictable()), (4, 0));
    let found = cache.match_prefix(&plain(), &[1, 2, 3, 4]);
    assert_eq!((found.cached_len, found.pages.len()), (0, 0));
    let receipt = cache.lock(found.node).unwrap();
    let pages = take(&mut cache, 1);
    cache
        .insert_at(&plain(), receipt.node(), &[1, 2], &pages)
        .unwrap();
    assert_eq!(cache.num_free(), 4);
    cache.unlock(receipt);
    cache.check_invariants().unwrap();
}

#[test]
fn a_path_of_many_nodes_needs_no_stack() {
    const LEN: u32 = 20_000;
    let mut cache = new_cache(1, LEN);
    let tokens: Vec<u32> = (0..LEN).collect();
    let pages = put(&mut cache, &plain(), &tokens);
    // Each match ends inside the first node and cuts one page off its end.
    for end in (1..LEN as usize).rev() {
        cache.match_prefix(&plain(), &tokens[..end]);
    }
    let found = cache.match_prefix(&plain(), &tokens);
    assert_eq!(found.pages, pages);
    let receipt = cache.lock(found.node).unwrap();
    assert_eq!(cache.num_locked(), LEN);
    cache.unlock(receipt);
    assert_eq!(cache.prefix_tokens(found.node).unwrap(), tokens);
    cache.check_invariants().unwrap();
    assert_eq!(
        cache.evict(LEN - 1),
        LEN - 1,
        "one page a node, from the end"
    );
    assert_eq!(cache.match_dry_run(&plain(), &tokens), 1);
}

#[test]
fn salts_that_hold_nothing_leave_nothing_behind() {
    let mut cache = new_cache(1, 4);
    for number in 0..50 {
        let salted = Namespace {
            cache_salt: Some(number.to_string()),
            ..plain()
        };
        let node = cache.match_prefix(&salted, &[1]).node;
        let receipt = cache.lock(node).unwrap();
        put(&mut cache, &salted, &[1, 2]);
        let root = cache.match_prefix(&salted, &[]).node;
        assert_eq!(cache.prefix_len(root), Ok(0));
        assert_eq!(cache.evict(4), 2);
        assert!(
            cache.prefix_len(root).is_err(),
            "the root went with its last page"
        );
        cache.unlock(receipt);
    }
    cache.check_invariants().unwrap();
}

#[test]
fn a_locked_root_stays_until_it_is_unlocked() {
    let mut cache = new_cache(1, 4);
    put(&mut cache, &plain(), &[1]);
    let root = cache.match_prefix(&plain(), &[]).node;
    let receipt = cache.lock(root).unwrap();
    assert_eq!(cache.evict(1), 1);
    cache.check_invariants().unwrap();
    let pages = take(&mut cache, 1);
    cache.insert_at(&plain(), root, &[1], &pages).unwrap();
    assert_eq!(cache.evict(1), 1);
    cache.unlock(receipt);
    assert!(cache.prefix_len(root).is_err());
    cache.check_invariants().unwrap();
}

#[test]
#[should_panic(expected = "page 1 is not held by the caller")]
fn freeing_twice_panics() {
    let mut cache = new_cache(2, 4);
    let pages = take(&mut cache, 1);
    cache.free(&pages);
    cache.free(&pages);
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "dropped without unlock")]
fn dropping_a_receipt_panics() {
    let mut cache = new_cache(2, 4);
    let node = cache.match_prefix(&plain(), &[]).node;
    drop(cache.lock(node).unwrap());
}
