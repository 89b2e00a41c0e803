//! What the cache tells others: events, versions of matches, retired generations, policies.
#![allow(
    clippy::unwrap_used,
    reason = "test code; the exemption for tests knows test functions only"
)]

mod common;

use common::{new_cache, put, take};
use dsserve_radix_cache::{
    block_hash, page_hashes, CacheConfig, EvictionPolicy, InsertOptions, KvEvent, Medium,
    Namespace, RadixCache,
};

fn plain() -> Namespace {
    Namespace::default()
}

fn salted(text: &str) -> Namespace {
    let mut namespace = plain();
    namespace.cache_salt = Some(text.to_owned());
    namespace
}

#[test]
fn a_match_counts_as_current_until_something_follows_its_own_tokens() {
    let mut cache = new_cache(2, 16);
    let system = [1, 2, 3, 4];
    put(&mut cache, &plain(), &system);
    let waiting = [1, 2, 3, 4, 5, 6, 7, 8];
    let found = cache.match_prefix(&plain(), &waiting);
    // Another request with the same system prompt, and one that splits it.
    put(&mut cache, &plain(), &[1, 2, 3, 4, 9, 9]);
    put(&mut cache, &plain(), &[1, 2, 8, 8]);
    assert!(cache.is_current(&found, &waiting));
    assert!(
        !cache.unchanged_since(found.node, found.version),
        "only the tokens tell"
    );
    put(&mut cache, &plain(), &[1, 2, 3, 4, 5, 6]);
    assert!(!cache.is_current(&found, &waiting));
    let found = cache.match_prefix(&plain(), &waiting);
    assert_eq!(found.cached_len, 6);
    assert!(cache.unchanged_since(found.node, found.version));
    // Inserts below other nodes are no change.
    put(&mut cache, &plain(), &[1, 2, 3, 4, 9, 9, 9, 9]);
    assert!(cache.unchanged_since(found.node, found.version));
    assert_eq!(cache.evict(6), 6);
    assert!(!cache.is_current(&found, &waiting), "evicted");
}

#[test]
fn nothing_cached_changes_with_the_first_insert_of_any_namespace() {
    let mut cache = new_cache(2, 16);
    let found = cache.match_prefix(&plain(), &[1, 2]);
    assert!(cache.unchanged_since(found.node, found.version));
    put(&mut cache, &salted("a"), &[1, 2]);
    assert!(!cache.unchanged_since(found.node, found.version));
    assert!(
        !cache.is_current(&found, &[1, 2]),
        "its namespace is not known"
    );
}

#[test]
fn a_retired_generation_goes_first_whenever_it_was_used() {
    let mut cache = new_cache(1, 8);
    let old = plain();
    let mut new = plain();
    new.model_generation = 1;
    put(&mut cache, &new, &[1]);
    put(&mut cache, &old, &[2, 3]);
    let held = cache.match_prefix(&old, &[2]).node;
    let receipt = cache.lock(held).unwrap();
    cache.retire_generations(1);
    cache.check_invariants().unwrap();
    assert_eq!(cache.evict(1), 1);
    assert_eq!(
        cache.match_dry_run(&old, &[2, 3]),
        1,
        "the unlocked part went"
    );
    put(&mut cache, &new, &[4]);
    cache.unlock(receipt);
    assert_eq!((cache.evict(1), cache.match_dry_run(&old, &[2])), (1, 0));
    // A late insert for the old generation goes first as well.
    put(&mut cache, &old, &[5]);
    assert_eq!((cache.evict(1), cache.match_dry_run(&old, &[5])), (1, 0));
    assert_eq!(cache.match_dry_run(&new, &[1]), 1);
    cache.check_invariants().unwrap();
}

/// Inserts one-page prompts 0..4, then hits some; returns in which order they go.
fn order_of(policy: EvictionPolicy, priorities: [i32; 4], hits: &[u32]) -> Vec<u32> {
    let mut cache = RadixCache::new(CacheConfig::new(1, 4).with_policy(policy)).unwrap();
    for (token, priority) in (0..4).zip(priorities) {
        let pages = take(&mut cache, 1);
        let options = InsertOptions::default().with_priority(priority);
        cache
            .insert_with(&plain(), &[token], &pages, options)
            .unwrap();
    }
    for &token in hits {
        cache.match_prefix(&plain(), &[token]);
    }
    cache.check_invariants().unwrap();
    let mut left: Vec<u32> = (0..4).collect();
    let mut gone = Vec::new();
    while !left.is_empty() {
        assert_eq!(cache.evict(1), 1);
        let is_left = |token: &u32| cache.match_dry_run(&plain(), &[*token]) > 0;
        let (stay, goes) = left.into_iter().partition(is_left);
        left = stay;
        gone.extend::<Vec<u32>>(goes);
    }
    gone
}

#[test]
fn each_policy_has_its_order() {
    let same = [0; 4];
    let hits = [1, 1, 0, 2, 0, 0];
    assert_eq!(order_of(EvictionPolicy::Lru, same, &hits), [3, 1, 2, 0]);
    assert_eq!(order_of(EvictionPolicy::Lfu, same, &hits), [3, 2, 1, 0]);
    assert_eq!(order_of(EvictionPolicy::Slru, same, &hits), [3, 2, 1, 0]);
    assert_eq!(order_of(EvictionPolicy::Fifo, same, &hits), [0, 1, 2, 3]);
    let priorities = [5, -1, 5, 0];
    assert_eq!(
        order_of(EvictionPolicy::Priority, priorities, &[0]),
        [1, 3, 2, 0]
    );
    assert_eq!(order_of(EvictionPolicy::Cost, same, &hits), [3, 2, 1, 0]);
}

#[test]
fn a_shared_prefix_takes_the_highest_priority_of_its_requests() {
    let policy = EvictionPolicy::Priority;
    let mut cache = RadixCache::new(CacheConfig::new(1, 8).with_policy(policy)).unwrap();
    for (tokens, priority) in [([1, 2], 9), ([1, 3], 0), ([4, 5], 5)] {
        let pages = take(&mut cache, 2);
        let options = InsertOptions::default().with_priority(priority);
        let inserted = cache
            .insert_with(&plain(), &tokens, &pages, options)
            .unwrap();
        for replaced in inserted.replaced {
            cache.free(&[replaced.own]);
        }
    }
    assert_eq!(cache.evict(3), 3);
    assert_eq!(cache.match_dry_run(&plain(), &[1, 3]), 1);
    assert_eq!(cache.match_dry_run(&plain(), &[4, 5]), 0);
    assert_eq!(cache.match_dry_run(&plain(), &[1, 2]), 2);
}

#[test]
fn events_name_blocks_by_tokens_and_namespace() {
    let mut cache = RadixCache::new(CacheConfig::new(2, 8).with_events(3)).unwrap();
    assert_eq!(cache.take_events(1), None);
    put(&mut cache, &salted("a"), &[1, 2, 3, 4]);
    put(&mut cache, &salted("a"), &[1, 2, 9, 9]);
    let batch = cache.take_events(7).unwrap();
    assert_eq!((batch.sequence, batch.timestamp_us), (0, 7));
    let hashes = page_hashes(&salted("a"), &[1, 2, 3, 4], 2);
    let names: Vec<_> = hashes
        .iter()
        .map(|hash| block_hash(&salted("a"), hash))
        .collect();
    assert_ne!(
        names[0],
        block_hash(&plain(), &hashes[0]),
        "a salt shows in the name"
    );
    let [first, second] = &batch.events[..] else {
        panic!("two events: {batch:?}");
    };
    let KvEvent::BlockStored {
        block_hashes,
        parent_block_hash,
        token_ids,
        block_size,
        medium,
        namespace,
        trailing_ok,
    } = first
    else {
        panic!("stored first: {first:?}");
    };
    assert_eq!((block_hashes, *parent_block_hash), (&names, None));
    assert_eq!((&token_ids[..], *block_size), (&[1, 2, 3, 4][..], 2));
    assert_eq!(
        (*medium, &**namespace, trailing_ok),
        (Medium::Gpu, &salted("a"), &None)
    );
    let KvEvent::BlockStored {
        parent_block_hash,
        token_ids,
        ..
    } = second
    else {
        panic!("stored second: {second:?}");
    };
    assert_eq!(
        (*parent_block_hash, &token_ids[..]),
        (Some(names[0]), &[9, 9][..])
    );
}

#[test]
fn hashes_are_kept_when_first_wanted_and_forgotten_with_their_page() {
    let mut cache = new_cache(2, 2);
    put(&mut cache, &plain(), &[1, 2, 3, 4]);
    let node = cache.match_prefix(&plain(), &[1, 2, 3, 4]).node;
    let hashes = page_hashes(&plain(), &[1, 2, 3, 4], 2);
    assert_eq!(cache.prefix_hashes(node).unwrap(), hashes);
    let head = cache.match_prefix(&plain(), &[1, 2]).node;
    assert_eq!(
        cache.prefix_hashes(head).unwrap(),
        hashes[..1],
        "sliced at a split"
    );
    cache.check_invariants().unwrap();
    put(&mut cache, &plain(), &[5, 6, 7, 8]);
    let node = cache.match_prefix(&plain(), &[5, 6, 7, 8]).node;
    let hashes = page_hashes(&plain(), &[5, 6, 7, 8], 2);
    assert_eq!(cache.prefix_hashes(node).unwrap(), hashes);
}

#[test]
fn a_million_tokens_at_page_size_one_need_no_stack() {
    const LEN: u32 = 1_000_000;
    let mut cache = new_cache(1, LEN);
    let tokens: Vec<u32> = (0..LEN).map(|position| position * 7 % 1013).collect();
    put(&mut cache, &plain(), &tokens);
    for end in (20_000..LEN as usize).step_by(20_000) {
        cache.match_prefix(&plain(), &tokens[..end]);
    }
    let found = cache.match_prefix(&plain(), &tokens);
    assert_eq!(found.cached_len, LEN);
    let receipt = cache.lock(found.node).unwrap();
    assert_eq!(cache.num_locked(), LEN);
    cache.unlock(receipt);
    assert_eq!(cache.evict(LEN / 2 + 1), LEN / 2 + 1);
    assert_eq!(cache.match_dry_run(&plain(), &tokens), LEN / 2 - 1);
    cache.check_invariants().unwrap();
}
