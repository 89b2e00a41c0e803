//! Who goes first: each policy, ageing, half-done prompts, each in a situation made for it.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::steps::{admissions, one_by_one, run_step, scheduler};
use common::{config, prompt, spec};
use dsserve_scheduler::{Policy, PriorityConfig, RequestSpec, Scheduler, SchedulerConfig};

/// Puts a prompt into the cache.
fn warm(s: &mut Scheduler, token_ids: Vec<u32>) {
    assert!(s.submit(vec![spec(900, token_ids, 1)]).is_empty());
    run_step(s);
    while s.has_work() {
        run_step(s);
    }
}

#[test]
fn shortest_prefill_first_counts_uncached_tokens() {
    let mut s = scheduler(one_by_one(Policy::ShortestPrefillFirst));
    warm(&mut s, prompt(0, 40));
    s.submit(vec![
        spec(1, prompt(1, 21), 50),
        spec(2, prompt(2, 9), 50),
        spec(3, prompt(0, 42), 50),
    ]);
    assert_eq!(admissions(&mut s, 3), [3, 2, 1]);
}

#[test]
fn longest_output_first() {
    let mut s = scheduler(one_by_one(Policy::Lof));
    s.submit(vec![
        spec(1, prompt(1, 8), 20),
        spec(2, prompt(2, 8), 90),
        spec(3, prompt(3, 8), 50),
    ]);
    assert_eq!(admissions(&mut s, 3), [2, 3, 1]);
}

#[test]
fn longest_prefix_match_first() {
    let mut s = scheduler(one_by_one(Policy::Lpm));
    warm(&mut s, prompt(0, 60));
    let mut half = prompt(0, 32);
    half.extend(prompt(5, 9));
    s.submit(vec![
        spec(1, prompt(1, 20), 50),
        spec(2, half, 50),
        spec(3, prompt(0, 60), 50),
    ]);
    assert_eq!(admissions(&mut s, 3), [3, 2, 1]);
}

#[test]
fn depth_first_takes_the_heavier_subtree_first_and_strangers_last() {
    let mut s = scheduler(SchedulerConfig {
        prefill_max_requests: None,
        chunked_prefill_size: 512,
        max_prefill_tokens: 512,
        ..one_by_one(Policy::DfsWeight)
    });
    warm(&mut s, prompt(0, 40));
    warm(&mut s, prompt(1, 40));
    s.submit(vec![
        spec(1, prompt(7, 20), 50),
        spec(2, prompt(0, 45), 50),
        spec(3, prompt(1, 41), 50),
        spec(4, prompt(1, 46), 50),
    ]);
    assert_eq!(admissions(&mut s, 4), [3, 4, 2, 1]);
}

#[test]
fn waiting_longer_raises_the_response_ratio() {
    let run = |policy: Policy| {
        let mut s = scheduler(SchedulerConfig {
            max_running_requests: 1,
            ..one_by_one(policy)
        });
        s.submit(vec![spec(1, prompt(1, 20), 2), spec(2, prompt(2, 20), 2)]);
        run_step(&mut s);
        run_step(&mut s); // request 1 ends
        s.submit(vec![spec(3, prompt(3, 10), 2)]);
        admissions(&mut s, 1)
    };
    assert_eq!(run(Policy::ShortestPrefillFirst), [3]);
    assert_eq!(run(Policy::Hrrn), [2], "it waited through 20 tokens");
}

#[test]
fn the_seed_decides_the_shuffle() {
    let order = |policy_seed: u64| {
        let mut s = scheduler(SchedulerConfig {
            policy_seed,
            max_overtake: 1_000,
            ..one_by_one(Policy::Random)
        });
        s.submit((1..20).map(|id| spec(id, prompt(1, 8), 90)).collect());
        admissions(&mut s, 19)
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    assert_ne!(order(1), (1..20).collect::<Vec<u64>>());
}

#[test]
fn a_request_overtaken_often_enough_is_next() {
    let mut s = scheduler(SchedulerConfig {
        max_overtake: 3,
        ..one_by_one(Policy::ShortestPrefillFirst)
    });
    s.submit(vec![spec(1, prompt(9, 20), 50)]);
    let mut order = Vec::new();
    for id in 2..9 {
        s.submit(vec![spec(id, prompt(1, 8), 50)]);
        order.extend(run_step(&mut s).0.admitted);
    }
    assert_eq!(order, [2, 3, 4, 1, 5, 6, 7]);
}

#[test]
fn lookups_are_incremental_and_bounded() {
    let mut s = scheduler(SchedulerConfig {
        max_running_requests: 400,
        num_pages: 20_000,
        ..one_by_one(Policy::Lpm)
    });
    warm(&mut s, prompt(0, 40));
    let with_tail = |id: u64, index: u64| {
        let mut token_ids = prompt(0, 40);
        let digits = [index % 30, index / 30, 0, 0, 0, 0];
        token_ids.extend(digits.map(|digit| 2 + u32::try_from(digit).unwrap()));
        spec(id, token_ids, 4)
    };
    s.submit(
        (0..300)
            .map(|index| with_tail(100 + index, index))
            .collect(),
    );
    let lookups = |s: &mut Scheduler| {
        let before = s.stats().counters.rematches;
        assert_eq!(run_step(s).0.admitted.len(), 1);
        s.check_invariants().unwrap();
        s.stats().counters.rematches - before
    };
    let counts: Vec<u64> = (0..6).map(|_| lookups(&mut s)).collect();
    // 128 a step until all are known; then nothing changes what the others would find.
    assert_eq!(counts, [128, 128, 44, 0, 0, 0]);
    // One more page behind the last of them becomes cached: only that one looks again.
    let mut double = with_tail(901, 299);
    double.token_ids.extend([9; 20]);
    s.submit(vec![double]);
    let counts: Vec<u64> = (0..295).map(|_| lookups(&mut s)).collect();
    assert_eq!(
        counts.iter().sum::<u64>(),
        2,
        "its own lookup, and that of its double"
    );
}

#[test]
fn shorter_prompts_pass_a_half_done_one_a_few_times() {
    let mut s = scheduler(SchedulerConfig {
        prefill_max_defer: 2,
        max_running_requests: 16,
        num_pages: 400,
        ..SchedulerConfig {
            policy: Policy::ShortestPrefillFirst,
            ..config()
        }
    });
    s.submit(vec![spec(1, prompt(1, 90), 50)]);
    assert_eq!(run_step(&mut s).0.request_id, [1]);
    let mut steps = Vec::new();
    for id in 2..8 {
        // As long as a step: beside it the half-done prompt finds no room.
        s.submit(vec![spec(id, prompt(u32::try_from(id).unwrap(), 24), 50)]);
        let (plan, _) = run_step(&mut s);
        steps.push(plan.request_id[0]);
    }
    assert_eq!(steps, [2, 3, 1, 4, 5, 1]);
}

#[test]
fn a_half_done_prompt_waits_for_decode_steps_only_so_long() {
    let mut s = scheduler(SchedulerConfig {
        prefill_decode_interval: 5,
        prefill_max_defer: 2,
        ..config()
    });
    s.submit(vec![spec(1, prompt(1, 8), 50)]);
    run_step(&mut s);
    for _ in 0..5 {
        run_step(&mut s);
    }
    s.submit(vec![spec(2, prompt(2, 60), 50)]);
    let phases: Vec<bool> = (0..7)
        .map(|_| run_step(&mut s).0.request_id.contains(&2))
        .collect();
    assert_eq!(phases, [true, false, false, true, false, false, true]);
}

#[test]
fn prompts_in_a_row_do_not_overlap_where_that_is_off() {
    let mut s = scheduler(SchedulerConfig {
        overlap_prefills: false,
        ..one_by_one(Policy::Fcfs)
    });
    s.submit(vec![spec(1, prompt(1, 8), 1), spec(2, prompt(2, 8), 1)]);
    let first = s.next_plan(0).unwrap().unwrap().clone();
    assert_eq!(
        s.next_plan(0).unwrap(),
        None,
        "the first prompt is in flight"
    );
    common::steps::apply(&mut s, &first);
    assert_eq!(s.next_plan(0).unwrap().unwrap().request_id, [2]);
}

/// Steps until a large request is admitted while small ones of others keep coming and fit.
fn steps_until_the_large_one_runs(policy: Policy, fair: bool, priorities: bool) -> Option<usize> {
    let mut s = scheduler(SchedulerConfig {
        policy,
        fair,
        max_overtake: 3,
        num_pages: 30,
        inbatch_prefix_hold: 0,
        chunked_prefill_size: 200,
        max_prefill_tokens: 200,
        priority: PriorityConfig {
            enabled: priorities,
            ..PriorityConfig::default()
        },
        ..config()
    });
    let mut id = 10;
    let mut submit_small = |s: &mut Scheduler| {
        id += 1;
        s.submit(vec![RequestSpec {
            tenant: 2,
            priority: priorities.then_some(0),
            ..spec(u64::from(id), prompt(id, 20), 12)
        }]);
    };
    for _ in 0..3 {
        submit_small(&mut s);
        (0..3).for_each(|_| drop(run_step(&mut s)));
    }
    s.submit(vec![RequestSpec {
        tenant: 1,
        priority: priorities.then_some(5),
        ..spec(1, prompt(1, 100), 4)
    }]);
    (0..2_000).find(|_| {
        while s.num_waiting() < 3 {
            submit_small(&mut s);
        }
        run_step(&mut s).0.admitted.contains(&1)
    })
}

#[test]
fn a_request_that_others_pass_again_and_again_gets_its_turn() {
    for policy in [
        Policy::Lpm,
        Policy::ShortestPrefillFirst,
        Policy::Hrrn,
        Policy::DfsWeight,
    ] {
        for (fair, priorities) in [(false, false), (true, false), (false, true), (true, true)] {
            let steps = steps_until_the_large_one_runs(policy, fair, priorities);
            let steps = steps.unwrap_or_else(|| panic!("{policy:?}, {fair}, {priorities}: never"));
            assert!(steps < 200, "{policy:?}, {fair}, {priorities}: {steps}");
        }
    }
}
