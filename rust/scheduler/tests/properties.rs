//! Random interleavings of everything a scheduler is asked, against the fake device and an oracle.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::harness::Harness;
use dsserve_scheduler::{
    Namespace, Policy, PriorityConfig, RequestSpec, RetractionPolicy, SchedulerConfig,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Submit(RequestSpec),
    /// With the first ids of its prompt only.
    SubmitPart(RequestSpec, usize),
    /// Hand over so many more ids of some prompt.
    Feed(usize),
    /// Plan ahead by so many steps (0 = plain loop), apply one.
    Step(usize),
    Launch,
    Apply,
    Abort(usize),
    Finish(usize, u32),
    Poison(usize),
    Flush,
    Wait(u64),
}

prop_compose! {
    fn any_spec()(
        family in 0_u32..3,
        len in prop_oneof![1_u32..30, 1_u32..90],
        own_tail in 0_u32..3,
        max_new_tokens in prop_oneof![1 => Just(0_u32), 3 => 1_u32..6, 8 => 20_u32..80],
        min_new_tokens in 0_u32..6,
        ignore_eos: bool,
        stop in proptest::option::weighted(0.3, 1_u32..common::VOCAB),
        salt in proptest::option::weighted(0.1, Just(String::new())),
        whole_extend in proptest::bool::weighted(0.1),
        priority in proptest::option::weighted(0.7, -9_i32..30),
        tenant in 0_u64..3,
        deadline_us in proptest::option::weighted(0.1, 1_u64..3_000),
        draft_len in proptest::option::weighted(0.3, 0_u32..4),
        max_cached_len in proptest::option::weighted(0.1, 0_u32..60),
    ) -> RequestSpec {
        let mut token_ids = common::prompt(family, len);
        token_ids.extend(common::prompt(7 + own_tail, own_tail));
        RequestSpec {
            min_new_tokens,
            ignore_eos,
            stop_token_ids: stop.into_iter().collect(),
            namespace: Namespace { cache_salt: salt, ..Namespace::default() },
            whole_extend,
            priority,
            tenant,
            deadline_us,
            draft_len,
            max_cached_len,
            ..common::spec(0, token_ids, max_new_tokens)
        }
    }
}

prop_compose! {
    fn any_config()(
        (page_size, window, chunk_pages) in prop_oneof![
            Just((4_u32, 8_u32, 0_u32)),
            Just((4, 8, 3)),
            Just((8, 8, 1)),
            Just((8, 4, 0)),
            Just((2, 12, 2)),
            Just((16, 16, 0)),
        ],
        chunked in proptest::bool::weighted(0.9),
        pool_tokens in prop_oneof![80_u32..200, 200_u32..600],
        max_running_requests in 1_u32..7,
        (encoder_replay, decoder_replay, radix_cache) in prop_oneof![
            4 => Just((true, true, true)),
            1 => any::<(bool, bool, bool)>(),
        ],
        policy in any_policy(),
        (priority, fair) in (any_priority(), any::<bool>()),
        (draft_len, prefill_max_requests, prefill_max_defer, overlap_prefills) in (
            prop_oneof![2 => Just(0_u32), 1 => 1_u32..4],
            proptest::option::weighted(0.3, 1_u32..4),
            0_u32..4,
            proptest::bool::weighted(0.8),
        ),
        (max_overtake, inbatch_prefix_hold, retraction) in (1_u32..6, 0_u32..4, 0_usize..3),
        (waiting_timeout_us, running_timeout_us) in (
            proptest::option::weighted(0.1, 1_u64..3_000),
            proptest::option::weighted(0.1, 1_u64..3_000),
        ),
        max_queued_requests in proptest::option::weighted(0.2, 1_u32..6),
        mixed_chunk: bool,
        prefill_decode_interval in 0_u32..3,
        conservativeness in prop_oneof![3 => Just(0.0), 1 => Just(0.3), 1 => Just(2.0)],
        max_prefill_tokens in 1_u32..80,
    ) -> SchedulerConfig {
        let mixed_rows = if mixed_chunk { max_running_requests } else { 0 };
        let chunk = window + page_size * (1 + chunk_pages) + mixed_rows;
        SchedulerConfig {
            page_size,
            window,
            num_pages: pool_tokens / page_size,
            max_running_requests,
            chunked_prefill_size: if chunked { i64::from(chunk) } else { -1 },
            max_prefill_tokens,
            encoder_replay,
            decoder_replay,
            radix_cache,
            policy,
            priority,
            fair,
            draft_len,
            prefill_max_requests,
            prefill_max_defer,
            overlap_prefills,
            max_overtake,
            inbatch_prefix_hold,
            waiting_timeout_us,
            running_timeout_us,
            max_queued_requests,
            retraction_policy: [
                RetractionPolicy::Length,
                RetractionPolicy::Priority,
                RetractionPolicy::Cost,
            ][retraction],
            mixed_chunk,
            prefill_decode_interval,
            conservativeness,
            ..common::config()
        }
    }
}

fn any_policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        2 => Just(Policy::Fcfs),
        1 => Just(Policy::Lpm),
        1 => Just(Policy::DfsWeight),
        1 => Just(Policy::Hrrn),
        1 => Just(Policy::ShortestPrefillFirst),
        1 => Just(Policy::Lof),
        1 => Just(Policy::Random),
    ]
}

prop_compose! {
    fn any_priority()(
        enabled: bool,
        low_values_first: bool,
        preemption in proptest::bool::weighted(0.7),
        preemption_threshold in 0_u32..20,
    ) -> PriorityConfig {
        PriorityConfig {
            enabled,
            low_values_first,
            preemption,
            preemption_threshold,
            refuse_when_disabled: false,
        }
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => any_spec().prop_map(Op::Submit),
        1 => (any_spec(), any::<usize>()).prop_map(|(spec, first)| Op::SubmitPart(spec, first)),
        2 => (1_usize..60).prop_map(Op::Feed),
        12 => (0_usize..=2).prop_map(Op::Step),
        2 => Just(Op::Launch),
        2 => Just(Op::Apply),
        1 => any::<usize>().prop_map(Op::Abort),
        1 => (any::<usize>(), 0_u32..20).prop_map(|(which, kept)| Op::Finish(which, kept)),
        1 => any::<usize>().prop_map(Op::Poison),
        1 => Just(Op::Flush),
        2 => (1_u64..200).prop_map(Op::Wait),
    ]
}

fn run(config: &SchedulerConfig, ops: &[Op], drain_depth: usize) -> Harness {
    run_on(Harness::new(config), ops, drain_depth)
}

fn run_on(mut harness: Harness, ops: &[Op], drain_depth: usize) -> Harness {
    let mut next_id = 1;
    for op in ops {
        let live = harness.live();
        let pick = |which: usize| live.get(which % live.len().max(1)).copied().unwrap_or(0);
        match op {
            Op::Submit(spec) | Op::SubmitPart(spec, _) => {
                let mut spec = spec.clone();
                spec.request_id = next_id;
                spec.arrival_us = harness.now_us;
                spec.deadline_us = spec.deadline_us.map(|within| harness.now_us + within);
                spec.draft_len = allowed_drafts(&spec, harness.scheduler.config());
                next_id += 1;
                let whole = spec.token_ids.len();
                let first = match op {
                    Op::SubmitPart(_, first) => first % whole,
                    _ => whole,
                };
                harness.submit_part(spec, first);
            }
            Op::Feed(count) => harness.feed(*count),
            Op::Step(depth) => {
                harness.step((*depth).max(1));
                if *depth == 0 {
                    while harness.apply() {}
                }
            }
            Op::Launch if harness.scheduler.steps_in_flight() < 2 => {
                harness.launch();
            }
            Op::Launch | Op::Apply => {
                harness.apply();
            }
            Op::Abort(which) => harness.abort(pick(*which)),
            Op::Finish(which, kept) => harness.finish(pick(*which), *kept),
            Op::Poison(which) => harness.poison(pick(*which)),
            Op::Flush => {
                let _ = harness.scheduler.flush();
            }
            Op::Wait(us) => harness.now_us += us,
        }
    }
    harness.drain(drain_depth);
    harness.check_end();
    harness
}

/// What the request wants, as far as the server drafts.
fn allowed_drafts(spec: &RequestSpec, config: &SchedulerConfig) -> Option<u32> {
    spec.draft_len.map(|wanted| wanted.min(config.draft_len))
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// S1-S5, S7-S11, S15: the harness and the device check them at every operation.
    #[test]
    fn invariants_hold_under_any_interleaving(
        config in any_config(),
        ops in proptest::collection::vec(any_op(), 1..120),
        drain_depth in 1_usize..=2,
    ) {
        run(&config, &ops, drain_depth);
    }

    /// S14: however many drafts are accepted, the pages are there.
    #[test]
    fn pages_are_there_when_every_draft_is_accepted(
        config in any_config(),
        draft_len in 1_u32..6,
        ops in proptest::collection::vec(any_op(), 1..80),
    ) {
        let config = SchedulerConfig { draft_len, ..config };
        let mut harness = Harness::new(&config);
        harness.device.accepts_all = true;
        run_on(harness, &ops, 2);
    }

    /// S5 under memory pressure: requests outgrow the pool together and take turns.
    #[test]
    fn retraction_changes_no_output(
        config in any_config(),
        specs in proptest::collection::vec(any_spec(), 3..8),
        spare_pages in 0_u32..12,
        aborted in proptest::option::of((0_usize..8, 0_usize..60)),
        depth in 1_usize..=2,
    ) {
        let longest = 30 + 60 + config.overshoot();
        let config = SchedulerConfig {
            num_pages: longest / config.page_size + 1 + spare_pages,
            conservativeness: 0.0,
            max_running_requests: 6,
            max_queued_requests: None,
            chunked_prefill_size: config.chunked_prefill_size.max(64),
            ..config
        };
        let mut harness = Harness::new(&config);
        for (index, mut spec) in specs.into_iter().enumerate() {
            spec.request_id = index as u64 + 1;
            spec.token_ids.truncate(30);
            spec.max_new_tokens = 60;
            spec.deadline_us = None;
            spec.draft_len = allowed_drafts(&spec, &config);
            prop_assert!(harness.submit(spec));
        }
        if let Some((which, after)) = aborted {
            for _ in 0..after {
                harness.step(depth);
            }
            harness.abort(which as u64);
        }
        harness.drain(depth);
        harness.check_end();
    }

    #[test]
    fn equal_calls_give_equal_plans(
        config in any_config(),
        ops in proptest::collection::vec(any_op(), 1..60),
    ) {
        let first = run(&config, &ops, 2);
        let second = run(&config, &ops, 2);
        prop_assert!(first.plans == second.plans);
    }
}

/// Operations of the long run; `DSSERVE_SCHEDULER_OPS` sets another number.
const LONG_RUN_OPS: usize = 1_000_000;

/// The same invariants over many more operations: `cargo test --release -- --ignored`.
#[test]
#[ignore = "minutes; run by make test-all"]
fn invariants_hold_over_a_million_operations() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let wanted = std::env::var("DSSERVE_SCHEDULER_OPS");
    let wanted = wanted.ok().and_then(|text| text.parse().ok());
    let mut left = wanted.unwrap_or(LONG_RUN_OPS);
    let mut runner = TestRunner::deterministic();
    let strategy = (any_config(), proptest::collection::vec(any_op(), 200..400));
    while left > 0 {
        let (config, ops) = strategy.new_tree(&mut runner).unwrap().current();
        left = left.saturating_sub(ops.len());
        let mut harness = Harness::new(&config);
        harness.device.accepts_all = left.is_multiple_of(3);
        run_on(harness, &ops, 1 + left % 2);
    }
}

/// The random runs above must reach what they are meant to test.
#[test]
fn random_runs_reach_every_mechanism() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let crowded = any_config().prop_map(|config| SchedulerConfig {
        num_pages: 100 / config.page_size,
        conservativeness: 0.0,
        ..config
    });
    let strategy = (crowded, proptest::collection::vec(any_op(), 60..120));
    let mut reached = [0_u64; 14];
    for _ in 0..200 {
        let (config, ops) = strategy.new_tree(&mut runner).unwrap().current();
        let harness = run(&config, &ops, 2);
        let counters = harness.scheduler.stats().counters;
        let chunks = harness.chunks.values().flatten();
        let replay_only =
            chunks.filter(|(start, end, replay)| *replay > 0 && end - start == *replay);
        let here = [
            counters.retracted,
            counters.stalled_rows,
            counters.held_back,
            counters.evicted_pages,
            counters.cached_tokens,
            counters.encoder_replay_rows,
            counters.finished[1],
            counters.finished[5],
            replay_only.count() as u64,
            counters.preempted,
            counters.accepted_tokens,
            counters.draft_tokens - counters.accepted_tokens,
            counters.finished[8],
            counters.finished[9],
        ];
        for (sum, count) in reached.iter_mut().zip(here) {
            *sum += count;
        }
    }
    eprintln!("{reached:?}");
    assert!(reached.iter().all(|count| *count > 0), "{reached:?}");
}
