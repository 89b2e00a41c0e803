//! Who gets pages and gives them back: admission, retraction, abort, stop strings, flush.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::harness::Harness;
use common::steps::{run_step, scheduler};
use common::{config, prompt, spec};
use dsserve_scheduler::{FinishCode, RequestSpec, RetractionPolicy, SchedulerConfig, StepPlan};

#[test]
fn admission_sets_pages_aside_for_the_output_of_running_requests() {
    let waits = |ignore_eos: bool| {
        let mut s = scheduler(SchedulerConfig {
            num_pages: 30,
            conservativeness: 0.1,
            ..config()
        });
        let first = RequestSpec {
            ignore_eos,
            ..spec(1, prompt(0, 20), 80)
        };
        s.submit(vec![first]);
        run_step(&mut s);
        s.submit(vec![spec(2, prompt(1, 20), 20)]);
        run_step(&mut s).0.admitted.is_empty()
    };
    assert!(
        waits(true),
        "a request that ignores the end of sequence counts in full"
    );
    assert!(!waits(false), "others count by the new-token ratio");
}

fn crowded(depth: usize) -> Harness {
    let mut harness = Harness::new(&SchedulerConfig {
        num_pages: 20,
        conservativeness: 0.0,
        ..config()
    });
    for id in 1..=3 {
        let request = RequestSpec {
            ignore_eos: false,
            ..spec(id, prompt(u32::try_from(id).unwrap(), 9), 60)
        };
        harness.submit(request);
    }
    harness.drain(depth);
    harness
}

#[test]
fn a_step_takes_no_second_prompt_past_its_token_limit() {
    for (max_prefill_tokens, expected) in [(23, 1), (24, 2)] {
        let mut s = scheduler(SchedulerConfig {
            max_prefill_tokens,
            ..config()
        });
        s.submit(vec![spec(1, prompt(0, 12), 3), spec(2, prompt(1, 12), 3)]);
        assert_eq!(run_step(&mut s).0.admitted.len(), expected);
    }
}

#[test]
fn a_step_has_no_more_new_tokens_than_allowed_not_even_of_one_prompt() {
    // The last number: a window and a page go through all the same.
    for (max_prefill_tokens, expected) in [(64, 24), (16, 16), (19, 16), (1, 12)] {
        let mut s = scheduler(SchedulerConfig {
            max_prefill_tokens,
            ..config()
        });
        s.submit(vec![spec(1, prompt(0, 60), 1)]);
        let mut chunks = Vec::new();
        while s.has_work() {
            chunks.push(run_step(&mut s).0.totals.prefill_tokens);
        }
        assert_eq!(chunks[0], expected, "{chunks:?}");
        assert_eq!(chunks.iter().sum::<u32>(), 60);
        assert!(chunks.iter().all(|tokens| *tokens <= expected));
    }
    let mut s = scheduler(SchedulerConfig {
        max_prefill_tokens: 16,
        chunked_prefill_size: -1,
        ..config()
    });
    s.submit(vec![spec(1, prompt(0, 60), 1)]);
    assert_eq!(run_step(&mut s).0.totals.prefill_tokens, 60, "no chunking");
}

#[test]
fn a_match_from_before_a_flush_is_not_used() {
    let mut s = scheduler(SchedulerConfig {
        num_pages: 30,
        ..config()
    });
    s.submit(vec![spec(1, prompt(0, 40), 1)]);
    while s.has_work() {
        run_step(&mut s);
    }
    s.submit(vec![spec(2, prompt(1, 20), 60)]);
    run_step(&mut s);
    s.submit(vec![spec(3, prompt(0, 40), 40)]);
    assert!(
        run_step(&mut s).0.admitted.is_empty(),
        "no pages for it yet"
    );
    s.abort(&[2]).unwrap();
    assert!(s.flush().is_ok());
    let (plan, _) = run_step(&mut s);
    assert_eq!(
        (&plan.admitted[..], &plan.cached_len[..]),
        (&[3][..], &[0][..])
    );
}

#[test]
fn requests_that_outgrow_the_pool_take_turns_and_lose_nothing() {
    for depth in 1..=2 {
        let mut harness = crowded(depth);
        assert!(
            harness.scheduler.stats().counters.retracted > 0,
            "depth {depth}"
        );
        harness.check_end();
    }
}

#[test]
fn a_retracted_request_comes_back_with_a_hit_over_its_output() {
    // The second one, with the longer prompt, makes room for the last page of the first.
    let mut harness = Harness::new(&SchedulerConfig {
        num_pages: 26,
        conservativeness: 0.0,
        eos_token_ids: Vec::new(),
        ..config()
    });
    for (id, prompt_len, max_new_tokens) in [(1, 9, 30), (2, 40, 60)] {
        let request = RequestSpec {
            ignore_eos: false,
            ..spec(
                id,
                prompt(u32::try_from(id).unwrap(), prompt_len),
                max_new_tokens,
            )
        };
        harness.submit(request);
    }
    harness.drain(1);
    assert_eq!(harness.scheduler.stats().counters.retracted, 1);
    let again = |plan: &&StepPlan| plan.totals.replay_rows > 0;
    let again = harness.plans.iter().find(again).unwrap();
    assert_eq!(
        (&again.request_id[..], &again.cached_len[..]),
        (&[2][..], &[64][..])
    );
    assert_eq!(
        harness.requests[&2].cached_len, 0,
        "usage reports the first admission"
    );
    harness.check_end();
}

#[test]
fn aborting_in_each_state_returns_everything() {
    for steps in 0..40 {
        for depth in 1..=2 {
            let mut harness = Harness::new(&SchedulerConfig {
                num_pages: 22,
                conservativeness: 0.0,
                ..config()
            });
            for id in 1..=4 {
                harness.submit(spec(id, prompt(u32::try_from(id).unwrap(), 28), 30));
            }
            for _ in 0..steps {
                harness.step(depth);
            }
            for id in 1..=4 {
                harness.abort(id);
                harness.abort(id);
            }
            assert!(harness.live().is_empty());
            harness.drain(depth);
            harness.check_end();
        }
    }
}

#[test]
fn a_stop_string_drops_the_output_behind_it() {
    let mut s = scheduler(config());
    s.submit(vec![spec(1, prompt(0, 8), 20)]);
    for _ in 0..6 {
        run_step(&mut s);
    }
    s.finish(1, 4).unwrap();
    s.finish(1, 4).unwrap();
    s.abort(&[1]).unwrap();
    let outputs = s.take_outputs();
    assert_eq!(outputs.finish_codes, [FinishCode::StopString]);
    assert_eq!((outputs.len(), &outputs.output_lens[..]), (1, &[4][..]));
    assert_eq!(s.pool_table()[0].evictable, 3, "8 prompt and 4 kept tokens");
}

#[test]
fn flush_is_refused_while_requests_hold_pages() {
    let mut s = scheduler(config());
    s.submit(vec![spec(7, prompt(0, 20), 2)]);
    run_step(&mut s);
    assert_eq!(s.flush(), Err(vec![7]));
    run_step(&mut s);
    assert_eq!(s.flush(), Ok(5));
    assert_eq!(s.pool_table()[0].free, 64);
}

/// The request that is retracted first when three grow out of the pool.
fn first_retracted(policy: RetractionPolicy) -> u64 {
    let mut s = scheduler(SchedulerConfig {
        num_pages: 20,
        conservativeness: 0.0,
        retraction_policy: policy,
        ..config()
    });
    for (id, priority) in [(1, 5), (2, -3), (3, 7)] {
        s.submit(vec![RequestSpec {
            priority: Some(priority),
            ignore_eos: false,
            ..spec(id, prompt(u32::try_from(id).unwrap(), 20), 40)
        }]);
    }
    let mut running = Vec::new();
    for _ in 0..400 {
        let (plan, _) = run_step(&mut s);
        let now: Vec<u64> = plan.request_id.clone();
        if let Some(gone) = running.iter().find(|id| !now.contains(id)) {
            if s.stats().counters.retracted > 0 {
                return *gone;
            }
        }
        running = now;
    }
    panic!("nobody was retracted");
}

#[test]
fn retraction_policy_priority_takes_the_least_urgent_request() {
    assert_eq!(first_retracted(RetractionPolicy::Priority), 2);
}

#[test]
fn retraction_policy_length_takes_the_last_arrival_among_equals() {
    assert_eq!(first_retracted(RetractionPolicy::Length), 3);
}
