//! Mechanisms that change no output, each where it decides what happens.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::steps::{apply, run_step, scheduler};
use common::{config, prompt, spec};
use dsserve_scheduler::{
    Policy, PriorityConfig, RequestSpec, RetractionPolicy, Scheduler, SchedulerConfig,
};

/// No output ends by itself, and little of it is reserved.
fn crowded(num_pages: u32) -> SchedulerConfig {
    SchedulerConfig {
        num_pages,
        conservativeness: 0.0,
        eos_token_ids: Vec::new(),
        chunked_prefill_size: 128,
        max_prefill_tokens: 128,
        inbatch_prefix_hold: 0,
        ..config()
    }
}

fn may_stop(id: u32, prompt_len: u32, max_new_tokens: u32) -> RequestSpec {
    RequestSpec {
        ignore_eos: false,
        ..spec(u64::from(id), prompt(id, prompt_len), max_new_tokens)
    }
}

fn run_alone(s: &mut Scheduler, request: RequestSpec) {
    assert!(s.submit(vec![request]).is_empty());
    while s.has_work() {
        run_step(s);
    }
}

#[test]
fn what_waiting_requests_will_hit_is_evicted_last() {
    let mut s = scheduler(SchedulerConfig {
        max_running_requests: 1,
        ..crowded(40)
    });
    run_alone(&mut s, spec(1, prompt(1, 40), 1));
    run_alone(&mut s, spec(2, prompt(2, 40), 1));
    s.submit(vec![spec(3, prompt(3, 9), 110)]);
    run_step(&mut s);
    // It will hit the prompt that was used longest ago.
    s.submit(vec![spec(4, prompt(1, 45), 4)]);
    let plan = loop {
        let (plan, _) = run_step(&mut s);
        if plan.admitted == [4] {
            break plan;
        }
    };
    assert!(s.stats().counters.evicted_pages >= 8);
    assert_eq!(plan.cached_len, [40]);
}

#[test]
fn eight_requests_that_do_not_fit_are_passed_over_and_not_one_more() {
    for (num_large, passes) in [(8, true), (9, false)] {
        let mut s = scheduler(SchedulerConfig {
            policy: Policy::Lpm,
            ..crowded(30)
        });
        s.submit(vec![spec(100, prompt(100, 40), 40)]);
        run_step(&mut s);
        let large = |id: u64| spec(id, prompt(u32::try_from(id).unwrap(), 40), 20);
        s.submit((1..=num_large).map(large).collect());
        s.submit(vec![spec(50, prompt(50, 8), 4)]);
        assert_eq!(run_step(&mut s).0.admitted == [50], passes);
    }
}

#[test]
fn the_reserved_share_decays_with_decode_steps_to_a_floor() {
    let mut s = scheduler(SchedulerConfig {
        context_length: 2_000,
        num_pages: 600,
        conservativeness: 1.0,
        ..config()
    });
    s.submit(vec![spec(1, prompt(1, 9), 1_000)]);
    run_step(&mut s);
    let is = |s: &Scheduler, expected: f64| {
        let ratio = s.stats().new_token_ratio;
        assert!((ratio - expected).abs() < 1e-9, "{ratio} {expected}");
    };
    is(&s, 0.7);
    for _ in 0..100 {
        run_step(&mut s);
    }
    is(&s, 0.7 - (0.7 - 0.098) / 6.0);
    for _ in 0..600 {
        run_step(&mut s);
    }
    is(&s, 0.098);
}

#[test]
fn a_retraction_sets_the_reserved_share_to_what_those_who_go_on_used() {
    let mut s = scheduler(crowded(20));
    s.submit((1..=3).map(|id| may_stop(id, 9, 60)).collect());
    while s.stats().counters.retracted == 0 {
        assert!(s.stats().new_token_ratio < 1e-9);
        run_step(&mut s);
    }
    let stats = s.stats();
    assert_eq!(stats.num_running, 2);
    #[expect(clippy::cast_precision_loss, reason = "a few tokens")]
    let output_len = stats.counters.generated_tokens as f64 / 3.0;
    let expected = (output_len + 20.0) / 60.0;
    let ratio = stats.new_token_ratio;
    assert!((ratio - expected).abs() < 1.0 / 60.0, "{ratio} {expected}");
}

#[test]
fn retraction_by_cost_takes_the_one_that_brings_the_most_pages() {
    for (retraction_policy, expected) in
        [(RetractionPolicy::Length, 2), (RetractionPolicy::Cost, 1)]
    {
        let mut s = scheduler(SchedulerConfig {
            retraction_policy,
            ..crowded(20)
        });
        s.submit(vec![may_stop(1, 40, 40)]);
        for _ in 0..5 {
            run_step(&mut s);
        }
        s.submit(vec![may_stop(2, 9, 60)]);
        let plan = loop {
            let (plan, _) = run_step(&mut s);
            if s.stats().counters.retracted > 0 {
                break plan;
            }
        };
        assert_eq!(plan.request_id, [3 - expected], "{retraction_policy:?}");
    }
}

#[test]
fn nobody_is_preempted_for_pages_that_are_on_their_way_back() {
    let mut s = scheduler(SchedulerConfig {
        max_running_requests: 8,
        priority: PriorityConfig {
            enabled: true,
            ..PriorityConfig::default()
        },
        ..crowded(30)
    });
    let of_priority = |id: u32, prompt_len: u32, priority: i32| RequestSpec {
        priority: Some(priority),
        ..may_stop(id, prompt_len, 20)
    };
    s.submit(vec![of_priority(1, 40, 0), of_priority(2, 40, 50)]);
    run_step(&mut s);
    let in_flight = s.next_plan(0).unwrap().unwrap().clone();
    s.abort(&[2]).unwrap();
    s.submit(vec![of_priority(3, 50, 50)]);
    let next = s.next_plan(0).unwrap().unwrap().clone();
    assert_eq!(next.request_id, [1]);
    assert_eq!(s.stats().counters.preempted, 0);
    apply(&mut s, &in_flight);
    apply(&mut s, &next);
    assert_eq!(run_step(&mut s).0.admitted, [3]);
    assert_eq!(s.stats().counters.preempted, 0);
}

#[test]
fn each_of_those_admitted_together_overtakes_the_earlier_one() {
    // Eight shorter prompts pass the first: it is next where no more than eight may.
    for (max_overtake, fair) in [(8, false), (9, false), (8, true), (9, true)] {
        let mut s = scheduler(SchedulerConfig {
            policy: Policy::ShortestPrefillFirst,
            max_running_requests: 64,
            prefill_max_requests: Some(8),
            max_overtake,
            fair,
            ..crowded(2_000)
        });
        let of_tenant = |id: u32, prompt_len: u32| RequestSpec {
            tenant: 7,
            ..may_stop(id, prompt_len, 4)
        };
        s.submit(vec![of_tenant(2, 30)]);
        s.submit((3..11).map(|id| of_tenant(id, 9)).collect());
        assert_eq!(run_step(&mut s).0.admitted, (3..11).collect::<Vec<u64>>());
        s.submit((13..33).map(|id| of_tenant(id, 9)).collect());
        let next = run_step(&mut s).0.admitted;
        assert_eq!(next.contains(&2), max_overtake == 8, "{fair}: {next:?}");
    }
}
