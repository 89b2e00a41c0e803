//! Random operations on the cache against a flat dictionary (R1-R10, R12 of the design).
//!
//! 60,000 operations by default, 1,200,000 with `--ignored`.

mod common;

use common::harness::{Harness, Op, Setup};
use dsserve_radix_cache::EvictionPolicy;
use proptest::prelude::*;

const OPS_PER_CASE: usize = 250;

fn key(max_pages: usize) -> impl Strategy<Value = Vec<u8>> {
    // Few symbols, so that keys share prefixes and leave them in the middle of nodes.
    prop::collection::vec(prop_oneof![5 => Just(0_u8), 2 => 1..4_u8], 0..=max_pages)
}

fn op() -> impl Strategy<Value = Op> {
    let namespace = || prop_oneof![6 => Just(0_usize), 1 => 1..5_usize];
    let tail = || prop_oneof![3 => Just(255_u8), 1 => any::<u8>()];
    let index = 0..24_usize;
    prop_oneof![
        6 => (namespace(), key(14), 0..16_usize)
            .prop_map(|(namespace, key, extra)| Op::Match { namespace, key, extra }),
        3 => (namespace(), key(8), 0..24_usize)
            .prop_map(|(namespace, key, known)| Op::LookUp { namespace, key, known }),
        1 => index.clone().prop_map(|place| Op::CountHit { place }),
        6 => (namespace(), key(14), any::<bool>(), tail(), -1..2_i32)
            .prop_map(|(namespace, key, keep, tail, priority)| {
                Op::Insert { namespace, key, keep, tail, priority }
            }),
        4 => (index.clone(), key(6), any::<bool>(), tail())
            .prop_map(|(place, key, keep, tail)| Op::InsertAt { place, key, keep, tail }),
        4 => index.clone().prop_map(|place| Op::Lock { place }),
        4 => index.clone().prop_map(|receipt| Op::Unlock { receipt }),
        1 => index.prop_map(|receipt| Op::ReleaseWindow { receipt }),
        3 => (0..12_u32).prop_map(|count| Op::Evict { count }),
        2 => (0..2_usize, 0..8_u32)
            .prop_map(|(component, count)| Op::EvictTails { component, count }),
        2 => (0..12_usize).prop_map(|count| Op::Free { count }),
        1 => (0..24_usize, 0..3_usize, any::<bool>())
            .prop_map(|(place, medium, is_stored)| Op::Copy { place, medium, is_stored }),
        1 => Just(Op::Flush),
        1 => (0..80_u32).prop_map(|page| Op::Wrong { page }),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let retire = prop_oneof![40 => op(), 1 => Just(Op::Retire)];
    let ops = prop::collection::vec(op(), OPS_PER_CASE);
    prop_oneof![3 => ops, 1 => prop::collection::vec(retire, OPS_PER_CASE)]
}

fn policy() -> impl Strategy<Value = EvictionPolicy> {
    prop::sample::select(vec![
        EvictionPolicy::Lru,
        EvictionPolicy::Lfu,
        EvictionPolicy::Slru,
        EvictionPolicy::Fifo,
        EvictionPolicy::Priority,
        EvictionPolicy::Cost,
    ])
}

fn page_size() -> impl Strategy<Value = u32> {
    prop::sample::select(vec![1_u32, 2, 4, 16])
}

fn component() -> impl Strategy<Value = (u32, u32, u32)> {
    let window = prop_oneof![6 => 1..24_u32, 1 => Just(u32::MAX)];
    (window, prop::sample::select(vec![1_u32, 2, 16]), 2..80_u32)
}

fn config(num_ops: usize) -> ProptestConfig {
    ProptestConfig {
        cases: u32::try_from(num_ops / OPS_PER_CASE).expect("fewer than 2^40 operations"),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn run(setup: &Setup, ops: &[Op]) {
    let mut harness = Harness::new(setup);
    for (step, op) in ops.iter().enumerate() {
        harness.run(op);
        if step % 10 == 9 {
            harness.compare_all();
        }
    }
    harness.finish();
}

fn plain(page_size: u32, num_pages: u32) -> Setup {
    Setup {
        page_size,
        num_pages,
        policy: EvictionPolicy::Lru,
        components: Vec::new(),
        replay_len: 0,
        events: false,
    }
}

fn full_setup() -> impl Strategy<Value = Setup> {
    let replay_len = prop_oneof![Just(0_u32), 1..9_u32];
    (page_size(), 6..72_u32, replay_len).prop_map(|(page_size, num_pages, replay_len)| Setup {
        replay_len,
        ..plain(page_size, num_pages)
    })
}

fn tail_setup() -> impl Strategy<Value = Setup> {
    let components = prop::collection::vec(component(), 1..=2);
    (page_size(), 6..72_u32, components, any::<bool>()).prop_map(
        |(page_size, num_pages, components, events)| Setup {
            components,
            events,
            ..plain(page_size, num_pages)
        },
    )
}

fn policy_setup() -> impl Strategy<Value = Setup> {
    let components = prop::collection::vec(component(), 0..=1);
    (page_size(), 6..72_u32, components, policy()).prop_map(
        |(page_size, num_pages, components, policy)| Setup {
            policy,
            components,
            events: true,
            ..plain(page_size, num_pages)
        },
    )
}

proptest! {
    #![proptest_config(config(20_000))]

    #[test]
    fn full_pages_agree_with_a_flat_dictionary(setup in full_setup(), ops in ops()) {
        run(&setup, &ops);
    }

    #[test]
    fn tails_agree_with_a_flat_dictionary(setup in tail_setup(), ops in ops()) {
        run(&setup, &ops);
    }

    #[test]
    fn policies_and_events_agree_with_a_flat_dictionary(setup in policy_setup(), ops in ops()) {
        run(&setup, &ops);
    }
}

proptest! {
    #![proptest_config(config(400_000))]

    #[test]
    #[ignore = "minutes; run by make test-all"]
    fn full_pages_agree_for_long(setup in full_setup(), ops in ops()) {
        run(&setup, &ops);
    }

    #[test]
    #[ignore = "minutes; run by make test-all"]
    fn tails_agree_for_long(setup in tail_setup(), ops in ops()) {
        run(&setup, &ops);
    }

    #[test]
    #[ignore = "minutes; run by make test-all"]
    fn policies_and_events_agree_for_long(setup in policy_setup(), ops in ops()) {
        run(&setup, &ops);
    }
}
