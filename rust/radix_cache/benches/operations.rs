//! Operations of the cache: match, insert of one page, evict, a turn in a full cache, page hashes.
#![allow(
    missing_docs,
    reason = "criterion's macro makes an undocumented function"
)]

use std::hint::black_box;

use criterion::{criterion_group, criterion_main, BatchSize, Criterion};
use dsserve_radix_cache::{page_hashes, CacheConfig, Namespace, NodeHandle, PageId, RadixCache};

const PROMPT_LEN: u32 = 128 * 1024;

/// A cache that holds one prompt in nodes of 4096 tokens, as chunks or turns leave it.
struct Filled {
    cache: RadixCache,
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    node: NodeHandle,
}

fn new_cache(page_size: u32, num_pages: u32) -> RadixCache {
    RadixCache::new(CacheConfig::new(page_size, num_pages)).expect("a valid configuration")
}

fn filled(page_size: u32) -> Filled {
    let mut cache = new_cache(page_size, PROMPT_LEN / page_size + 16);
    let namespace = Namespace::default();
    let tokens: Vec<u32> = (0..PROMPT_LEN).collect();
    let mut pages = Vec::new();
    assert!(cache.allocate(PROMPT_LEN / page_size, &mut pages));
    let mut node = cache.match_prefix(&namespace, &[]).node;
    for end in (4096..=tokens.len()).step_by(4096) {
        let num_pages = end / page_size as usize;
        let inserted = cache.insert_at(&namespace, node, &tokens[..end], &pages[..num_pages]);
        node = inserted.expect("pages are held").node;
    }
    Filled {
        cache,
        tokens,
        pages,
        node,
    }
}

fn bench_match(criterion: &mut Criterion) {
    let namespace = Namespace::default();
    for page_size in [64, 128] {
        let mut filled = filled(page_size);
        criterion.bench_function(&format!("match 128K, page {page_size}"), |bencher| {
            bencher.iter(|| {
                filled
                    .cache
                    .match_prefix(&namespace, black_box(&filled.tokens))
            });
        });
    }
}

fn bench_insert(criterion: &mut Criterion) {
    let namespace = Namespace::default();
    for page_size in [64_u32, 128] {
        let Filled {
            mut cache,
            mut tokens,
            mut pages,
            node,
        } = filled(page_size);
        let receipt = cache.lock(node).expect("a live node");
        tokens.extend(0..page_size);
        criterion.bench_function(&format!("insert 1 page, page {page_size}"), |bencher| {
            bencher.iter(|| {
                assert!(cache.allocate(1, &mut pages));
                let inserted = cache.insert_at(&namespace, node, black_box(&tokens), &pages);
                pages.pop();
                // The page leaves again so that every round inserts it anew.
                assert_eq!(cache.evict(1), 1);
                inserted
            });
        });
        cache.unlock(receipt);
    }
}

fn bench_evict(criterion: &mut Criterion) {
    let namespace = Namespace::default();
    for (page_size, pages_a_leaf) in [(64_u32, 1_u32), (64, 8), (128, 1), (128, 4)] {
        let leaf_len = pages_a_leaf * page_size;
        let build = || {
            let mut cache = new_cache(page_size, 2000);
            for first in 0..2000 / pages_a_leaf {
                let tokens: Vec<u32> = (first..first + leaf_len).map(|id| id * 3).collect();
                let mut pages = Vec::new();
                assert!(cache.allocate(pages_a_leaf, &mut pages));
                let inserted = cache.insert(&namespace, &tokens, &pages);
                inserted.expect("pages are held");
            }
            cache
        };
        let name = format!("evict 1000 pages, page {page_size}, {pages_a_leaf} a leaf");
        criterion.bench_function(&name, |bencher| {
            bencher.iter_batched(
                build,
                |mut cache| {
                    assert_eq!(cache.evict(1000), 1000);
                    cache
                },
                BatchSize::LargeInput,
            );
        });
    }
}

/// A full cache of unrelated 512-token leaves: evict 512 tokens, match (a miss), insert.
fn bench_turn(criterion: &mut Criterion) {
    let namespace = Namespace::default();
    for num_leaves in [1024_u32, 8192, 65_536] {
        let mut cache = new_cache(64, num_leaves * 8);
        let mut tokens = vec![0_u32; 512];
        let mut next = 0;
        let mut row = Vec::new();
        let mut turn = || {
            next += 1;
            tokens[0] = next;
            let found = cache.match_prefix(&namespace, black_box(&tokens));
            if cache.num_free() < 8 {
                cache.evict(8);
            }
            row.clear();
            assert!(cache.allocate(8, &mut row));
            cache.insert_at(&namespace, found.node, &tokens, &row)
        };
        for _ in 0..num_leaves {
            turn().expect("pages are held");
        }
        criterion.bench_function(
            &format!("evict, match, insert at {num_leaves}"),
            |bencher| {
                bencher.iter(&mut turn);
            },
        );
    }
}

fn bench_hash(criterion: &mut Criterion) {
    let namespace = Namespace::default();
    let tokens: Vec<u32> = (0..PROMPT_LEN).collect();
    for page_size in [64, 256] {
        criterion.bench_function(&format!("hash 128K, page {page_size}"), |bencher| {
            bencher.iter(|| page_hashes(&namespace, black_box(&tokens), page_size));
        });
    }
}

criterion_group!(
    benches,
    bench_match,
    bench_insert,
    bench_evict,
    bench_turn,
    bench_hash
);
criterion_main!(benches);
