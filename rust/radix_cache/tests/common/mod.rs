//! Helpers shared by the integration tests.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(
    clippy::unwrap_used,
    reason = "test code; the exemption for tests knows test functions only"
)]

mod compare;
pub mod harness;
pub mod index;
mod inserts;
pub mod model;
pub mod model_tails;
mod refusals;

use dsserve_radix_cache::{CacheConfig, Namespace, PageId, RadixCache};

/// An enabled cache.
pub fn new_cache(page_size: u32, num_pages: u32) -> RadixCache {
    RadixCache::new(CacheConfig::new(page_size, num_pages)).unwrap()
}

/// Namespaces that differ in one part each; `""` against `None` among them.
pub fn namespaces() -> Vec<Namespace> {
    let text = |text: &str| Some(text.to_owned());
    let plain = Namespace::default();
    vec![
        plain.clone(),
        Namespace {
            cache_salt: text(""),
            ..plain.clone()
        },
        Namespace {
            extra_key: text(""),
            ..plain.clone()
        },
        Namespace {
            adapter: text("a"),
            ..plain.clone()
        },
        Namespace {
            model_generation: 1,
            ..plain
        },
    ]
}

/// `count` pages of the caller's; evicts if the free list is short.
pub fn take(cache: &mut RadixCache, count: u32) -> Vec<PageId> {
    let mut pages = Vec::new();
    if count > cache.num_free() {
        cache.evict(count - cache.num_free());
    }
    assert!(cache.allocate(count, &mut pages));
    pages
}

/// Inserts whole pages of new KV and frees the duplicates; returns the pages given to the tree.
pub fn put(cache: &mut RadixCache, namespace: &Namespace, tokens: &[u32]) -> Vec<PageId> {
    let count = u32::try_from(tokens.len()).unwrap() / cache.config().page_size;
    let mut pages = take(cache, count);
    let inserted = cache.insert(namespace, tokens, &pages).unwrap();
    for replaced in inserted.replaced {
        cache.free(&[replaced.own]);
        pages[replaced.page_index as usize] = replaced.tree;
    }
    pages
}
