//! Random operations on the cache against a flat dictionary (R1-R6, R8, R10, R12 of the design).
//!
//! `DSSERVE_RADIX_OPS` sets how many operations run in all (default 20,000).

mod common;

use common::harness::{Harness, Op};
use proptest::prelude::*;

const OPS_PER_CASE: usize = 250;

fn key(max_pages: usize) -> impl Strategy<Value = Vec<u8>> {
    // Few symbols, so that keys share prefixes and leave them in the middle of nodes.
    prop::collection::vec(prop_oneof![5 => Just(0_u8), 2 => 1..4_u8], 0..=max_pages)
}

fn op() -> impl Strategy<Value = Op> {
    let namespace = || prop_oneof![6 => Just(0_usize), 1 => 1..5_usize];
    let index = 0..24_usize;
    prop_oneof![
        6 => (namespace(), key(14), 0..16_usize)
            .prop_map(|(namespace, key, extra)| Op::Match { namespace, key, extra }),
        6 => (namespace(), key(14), any::<bool>())
            .prop_map(|(namespace, key, keep)| Op::Insert { namespace, key, keep }),
        4 => (index.clone(), key(6), any::<bool>())
            .prop_map(|(place, key, keep)| Op::InsertAt { place, key, keep }),
        4 => index.clone().prop_map(|place| Op::Lock { place }),
        4 => index.prop_map(|receipt| Op::Unlock { receipt }),
        3 => (0..12_u32).prop_map(|count| Op::Evict { count }),
        2 => (0..12_usize).prop_map(|count| Op::Free { count }),
        1 => Just(Op::Flush),
        1 => (0..80_u32).prop_map(|page| Op::Wrong { page }),
    ]
}

fn num_cases() -> u32 {
    let num_ops = match std::env::var("DSSERVE_RADIX_OPS") {
        Ok(text) => text.parse().expect("DSSERVE_RADIX_OPS is a number"),
        Err(_) => 20_000,
    };
    u32::try_from(num_ops / OPS_PER_CASE + 1).expect("fewer than 2^40 operations")
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: num_cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn cache_agrees_with_a_flat_dictionary(
        page_size in prop::sample::select(vec![1_u32, 2, 4, 16]),
        num_pages in 6..72_u32,
        ops in prop::collection::vec(op(), OPS_PER_CASE),
    ) {
        let mut harness = Harness::new(page_size, num_pages);
        for (step, op) in ops.iter().enumerate() {
            harness.run(op);
            if step % 10 == 9 {
                harness.compare_all();
            }
        }
        harness.finish();
    }
}
