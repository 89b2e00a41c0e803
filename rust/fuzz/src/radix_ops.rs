//! Operations of the radix cache against a plain list of what was inserted.

use crate::bytes::Bytes;
use dsserve_radix_cache::{CacheConfig, Namespace, RadixCache, Receipt};

const NUM_PAGES: u32 = 24;
const MAX_TOKENS: usize = 40;

/// Inserts, matches, locks, evicts and flushes; the invariants must hold after each.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let page_size = 1 << bytes.below(4);
    let mut cache = RadixCache::new(CacheConfig::new(page_size, NUM_PAGES)).expect("valid");
    let namespaces = [
        Namespace::default(),
        Namespace {
            extra_key: Some(String::new()),
            ..Namespace::default()
        },
    ];
    let mut receipts: Vec<(Receipt, usize, Vec<u32>)> = Vec::new();
    let mut inserted: Vec<(usize, Vec<u32>)> = Vec::new();
    while !bytes.is_empty() {
        let space = bytes.below(2);
        match bytes.below(6) {
            0 | 1 => {
                let tokens = whole_pages(tokens(&mut bytes, &inserted), page_size);
                insert(&mut cache, &namespaces[space], &tokens);
                inserted.push((space, tokens));
            }
            2 => {
                let tokens = tokens(&mut bytes, &inserted);
                let dry = cache.match_dry_run(&namespaces[space], &tokens);
                let found = cache.match_prefix(&namespaces[space], &tokens);
                assert_eq!(found.cached_len, dry);
                assert_eq!(found.cached_len, page_size * len(&found.pages));
                let head = &tokens[..found.cached_len as usize];
                assert!(
                    head.is_empty() || is_known(&inserted, space, head),
                    "a match of what was never inserted"
                );
                if bytes.below(2) == 0 && !head.is_empty() {
                    let receipt = cache.lock(found.node).expect("just matched");
                    receipts.push((receipt, space, head.to_vec()));
                }
            }
            3 => {
                if !receipts.is_empty() {
                    let index = bytes.below(receipts.len().min(256));
                    let (receipt, ..) = receipts.swap_remove(index);
                    cache.unlock(receipt);
                }
            }
            4 => {
                let before = cache.num_free();
                let freed = cache.evict(u32::from(bytes.byte() % 32));
                assert_eq!(cache.num_free(), before + freed);
            }
            _ => {
                let result = cache.flush();
                assert_eq!(result.is_err(), !receipts.is_empty());
            }
        }
        for (_, space, tokens) in &receipts {
            let cached = cache.match_dry_run(&namespaces[*space], tokens);
            assert_eq!(cached, len(tokens), "a locked prefix is gone");
        }
        let sum = cache.num_free() + cache.num_evictable() + cache.num_locked() + cache.num_held();
        assert_eq!(sum, cache.num_pages());
        cache.check_invariants().expect("invariants");
    }
    for (receipt, ..) in receipts {
        cache.unlock(receipt);
    }
    cache.flush().expect("nothing is locked");
    assert_eq!(cache.num_free(), NUM_PAGES);
    cache.check_invariants().expect("invariants at the end");
}

/// Allocates pages, making room, and gives back what the tree did not take.
fn insert(cache: &mut RadixCache, namespace: &Namespace, tokens: &[u32]) {
    let num_pages = len(tokens) / cache.config().page_size;
    let mut pages = Vec::new();
    if cache.num_free() < num_pages {
        cache.evict(num_pages - cache.num_free());
    }
    if !cache.allocate(num_pages, &mut pages) {
        return;
    }
    let done = cache
        .insert(namespace, tokens, &pages)
        .expect("whole pages of ours");
    assert!(done.reused_len as usize <= tokens.len());
    for replaced in &done.replaced {
        assert_eq!(pages[replaced.page_index as usize], replaced.own);
        cache.free(&[replaced.own]);
    }
    assert_eq!(cache.match_dry_run(namespace, tokens), len(tokens));
}

/// New tokens of a small alphabet, often after the beginning of some that were inserted.
fn tokens(bytes: &mut Bytes<'_>, inserted: &[(usize, Vec<u32>)]) -> Vec<u32> {
    let mut tokens = Vec::new();
    if !inserted.is_empty() && bytes.below(3) > 0 {
        let (_, known) = &inserted[usize::from(bytes.short()) % inserted.len()];
        tokens.extend_from_slice(&known[..bytes.below(MAX_TOKENS + 1).min(known.len())]);
    }
    let num_new = bytes.below(MAX_TOKENS + 1).min(MAX_TOKENS - tokens.len());
    tokens.extend(bytes.take(num_new).iter().map(|byte| u32::from(byte % 3)));
    tokens
}

fn whole_pages(mut tokens: Vec<u32>, page_size: u32) -> Vec<u32> {
    tokens.truncate(tokens.len() / page_size as usize * page_size as usize);
    tokens
}

fn is_known(inserted: &[(usize, Vec<u32>)], space: usize, head: &[u32]) -> bool {
    inserted
        .iter()
        .any(|(other, tokens)| *other == space && tokens.starts_with(head))
}

fn len<T>(items: &[T]) -> u32 {
    u32::try_from(items.len()).expect("small")
}
