//! Operations of the radix cache against the flat dictionary of the crate's own property tests.

use crate::bytes::Bytes;
use crate::radix_model::harness::{Harness, Op, Setup};
use dsserve_radix_cache::EvictionPolicy;

const POLICIES: [EvictionPolicy; 6] = [
    EvictionPolicy::Lru,
    EvictionPolicy::Lfu,
    EvictionPolicy::Slru,
    EvictionPolicy::Fifo,
    EvictionPolicy::Priority,
    EvictionPolicy::Cost,
];
/// The model compares everything, which takes longer the more there is.
const MAX_OPS: usize = 400;
/// Places, matches and receipts that the model remembers.
const MAX_KNOWN: usize = 24;

/// Runs operations on any cache; after each the invariants must hold and the counts must agree.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let mut harness = Harness::new(&setup(&mut bytes));
    for step in 0..MAX_OPS {
        if bytes.is_empty() {
            break;
        }
        harness.run(&op(&mut bytes));
        harness.cache.check_invariants().expect("invariants");
        if step % 8 == 7 {
            harness.compare_all();
        }
    }
    harness.compare_all();
    harness.finish();
}

fn setup(bytes: &mut Bytes<'_>) -> Setup {
    Setup {
        page_size: 1 << bytes.below(5),
        num_pages: 6 + u32::from(bytes.byte() % 66),
        policy: POLICIES[bytes.below(POLICIES.len())],
        components: (0..bytes.below(3)).map(|_| component(bytes)).collect(),
        replay_len: [0, 0, 1, 8][bytes.below(4)],
        events: bytes.one_in(2),
    }
}

/// Window, tokens a page, number of pages.
fn component(bytes: &mut Bytes<'_>) -> (u32, u32, u32) {
    let window = match bytes.byte() {
        255 => u32::MAX,
        other => 1 + u32::from(other % 24),
    };
    (
        window,
        1 << bytes.below(5),
        2 + u32::from(bytes.byte() % 78),
    )
}

fn op(bytes: &mut Bytes<'_>) -> Op {
    match bytes.below(18) {
        0..=2 => Op::Match {
            namespace: namespace(bytes),
            key: key(bytes, 14),
            extra: bytes.below(16),
        },
        3 => Op::LookUp {
            namespace: namespace(bytes),
            key: key(bytes, 6),
            known: bytes.below(MAX_KNOWN),
        },
        4 => Op::CountHit {
            place: bytes.below(MAX_KNOWN),
        },
        5..=7 => Op::Insert {
            namespace: namespace(bytes),
            key: key(bytes, 14),
            keep: bytes.one_in(2),
            tail: tail(bytes),
            priority: i32::from(bytes.byte() % 3) - 1,
        },
        8 => Op::InsertAt {
            place: bytes.below(MAX_KNOWN),
            key: key(bytes, 6),
            keep: bytes.one_in(2),
            tail: tail(bytes),
        },
        9 => Op::Lock {
            place: bytes.below(MAX_KNOWN),
        },
        10 => Op::Unlock {
            receipt: bytes.below(MAX_KNOWN),
        },
        11 => Op::ReleaseWindow {
            receipt: bytes.below(MAX_KNOWN),
        },
        12 => Op::Evict {
            count: u32::from(bytes.byte() % 12),
        },
        13 => Op::EvictTails {
            component: bytes.below(2),
            count: u32::from(bytes.byte() % 8),
        },
        14 => Op::Free {
            count: bytes.below(12),
        },
        15 => Op::Copy {
            place: bytes.below(MAX_KNOWN),
            medium: bytes.below(3),
            is_stored: bytes.one_in(2),
        },
        16 => Op::Wrong {
            page: u32::from(bytes.byte() % 80),
        },
        _ if bytes.one_in(16) => Op::Retire,
        _ => Op::Flush,
    }
}

/// Mostly the same one.
fn namespace(bytes: &mut Bytes<'_>) -> usize {
    bytes.below(10).saturating_sub(5)
}

/// A page a symbol; mostly the same symbol, so that keys share prefixes and leave them inside nodes.
fn key(bytes: &mut Bytes<'_>, max_pages: usize) -> Vec<u8> {
    let len = bytes.below(max_pages + 1);
    let symbols = bytes.take(len).iter();
    symbols.map(|byte| (byte % 8).saturating_sub(4)).collect()
}

/// Exactly the window, or any number of pages.
fn tail(bytes: &mut Bytes<'_>) -> u8 {
    if bytes.one_in(4) {
        bytes.byte()
    } else {
        255
    }
}
