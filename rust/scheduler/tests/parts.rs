//! Prompts that come in parts, and the pages that long prompts take chunk by chunk.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::steps::{run_step, scheduler};
use common::{config, prompt, spec};
use dsserve_scheduler::{FinishCode, RequestSpec, Scheduler, SchedulerConfig, StepPlan};

/// A request of which the first `first` ids of its prompt are given.
fn part_of(request_id: u64, token_ids: &[u32], first: usize) -> RequestSpec {
    RequestSpec {
        prompt_len: Some(token_ids.len().try_into().unwrap()),
        ..spec(request_id, token_ids[..first].to_vec(), 5)
    }
}

/// Runs everything to its end.
fn plans(s: &mut Scheduler) -> Vec<StepPlan> {
    let mut plans = Vec::new();
    while s.has_work() {
        plans.push(run_step(s).0);
    }
    plans
}

#[test]
fn a_prompt_in_parts_is_planned_as_one_that_came_whole() {
    let long = prompt(0, 90);
    let run = |ends: &[usize]| {
        let mut s = scheduler(config());
        s.submit(vec![spec(1, prompt(0, 60), 5)]);
        plans(&mut s);
        let first = ends[0];
        assert!(s.submit(vec![part_of(2, &long, first)]).is_empty());
        for two in ends.windows(2) {
            assert_eq!(s.next_plan(0).unwrap(), None, "it is not whole");
            assert_eq!(s.extend_prompt(2, &long[two[0]..two[1]]), None);
            s.check_invariants().unwrap();
        }
        plans(&mut s)
    };
    let whole = run(&[90]);
    assert_eq!(whole[0].cached_len, [60]);
    for ends in [&[0, 90][..], &[1, 2, 90], &[40, 60, 64, 89, 90], &[89, 90]] {
        assert!(run(ends) == whole, "{ends:?}");
    }
}

#[test]
fn a_prompt_in_parts_takes_the_place_of_its_arrival() {
    let mut s = scheduler(SchedulerConfig {
        prefill_max_requests: Some(1),
        ..config()
    });
    let long = prompt(0, 20);
    s.submit(vec![part_of(1, &long, 10)]);
    s.submit(vec![spec(2, prompt(1, 9), 5), spec(3, prompt(2, 9), 5)]);
    assert_eq!(s.stats().num_waiting, 3);
    assert_eq!(run_step(&mut s).0.admitted, [2], "nobody waits for it");
    s.extend_prompt(1, &long[10..]);
    assert_eq!(run_step(&mut s).0.admitted, [1]);
    assert_eq!(run_step(&mut s).0.admitted, [3]);
}

#[test]
fn a_part_with_a_wrong_id_refuses_the_request() {
    let mut s = scheduler(config());
    s.submit(vec![part_of(1, &prompt(0, 20), 10)]);
    let refused = s.extend_prompt(1, &[3, common::VOCAB]).unwrap();
    assert_eq!((refused.request_id, refused.code), (1, "invalid_token_id"));
    assert!(!s.has_work());
    assert!(s.take_outputs().is_empty(), "who refuses it tells its end");
    let counters = s.stats().counters;
    assert_eq!((counters.submitted, counters.rejected), (0, 1));
    assert_eq!(s.extend_prompt(1, &[3]), None, "nobody knows it any more");
    assert!(s.submit(vec![spec(1, prompt(0, 20), 5)]).is_empty());
    s.check_invariants().unwrap();
}

#[test]
fn what_goes_beyond_the_length_is_ignored() {
    let mut s = scheduler(config());
    let long = prompt(0, 20);
    s.submit(vec![part_of(1, &long[..12], 10)]);
    s.extend_prompt(1, &[9, 8, common::VOCAB, common::VOCAB]);
    s.extend_prompt(1, &[7]);
    let plan = run_step(&mut s).0;
    assert_eq!(plan.token_ids[10..], [9, 8]);
}

#[test]
fn the_length_is_checked_when_the_first_part_comes() {
    let mut s = scheduler(config());
    let code = |s: &mut Scheduler, prompt_len, given: u32| {
        let request = RequestSpec {
            prompt_len: Some(prompt_len),
            ..spec(1, prompt(0, given), 5)
        };
        s.submit(vec![request])[0].code
    };
    assert_eq!(code(&mut s, 0, 0), "empty_prompt");
    assert_eq!(code(&mut s, 3, 4), "invalid_value");
    assert_eq!(code(&mut s, 1000, 4), "context_length_exceeded");
    s.submit(vec![part_of(1, &prompt(0, 20), 4)]);
    assert_eq!(code(&mut s, 20, 4), "duplicate_request_id");
}

#[test]
fn a_request_may_end_before_its_prompt_is_whole() {
    let timed = SchedulerConfig {
        waiting_timeout_us: Some(50),
        ..config()
    };
    let mut s = scheduler(timed);
    for id in 1..=4 {
        s.submit(vec![part_of(id, &prompt(0, 20), 10)]);
    }
    s.abort(&[1]).unwrap();
    s.finish(2, 0).unwrap();
    s.extend_prompt(1, &prompt(0, 20)[10..]);
    assert_eq!(s.next_plan(49).unwrap(), None);
    s.extend_prompt(3, &prompt(0, 20)[10..]);
    assert_eq!(s.next_plan(50).unwrap(), None);
    let outputs = s.take_outputs();
    assert_eq!(outputs.request_ids, [1, 2, 3, 4]);
    let (abort, deadline) = (FinishCode::Abort, FinishCode::Deadline);
    assert_eq!(outputs.finish_codes, [abort, abort, deadline, deadline]);
    assert_eq!(outputs.output_lens, [0; 4]);
    s.check_invariants().unwrap();
}

#[test]
fn a_full_queue_counts_prompts_that_are_not_whole() {
    let mut s = scheduler(SchedulerConfig {
        max_queued_requests: Some(2),
        ..config()
    });
    s.submit(vec![
        part_of(1, &prompt(0, 20), 10),
        spec(2, prompt(1, 9), 5),
    ]);
    assert_eq!(
        s.submit(vec![spec(3, prompt(1, 9), 5)])[0].code,
        "queue_full"
    );
    assert_eq!(s.num_receiving(), 1);
}

#[test]
fn a_prompt_takes_its_pages_chunk_by_chunk_and_nobody_else_gets_them() {
    let mut s = scheduler(SchedulerConfig {
        num_pages: 30,
        ..config()
    });
    s.submit(vec![spec(1, prompt(0, 80), 1)]);
    let full = |s: &Scheduler| s.pool_table()[0];
    let mut held = Vec::new();
    for _ in 0..3 {
        run_step(&mut s);
        let pool = full(&s);
        held.push((pool.locked + pool.private, pool.promised));
        assert_eq!(pool.available(), 10, "30 less the 20 that the prompt needs");
    }
    assert_eq!(held, [(6, 14), (12, 8), (18, 2)]);
    // 11 pages are free, but it needs 2 of them.
    s.submit(vec![spec(2, prompt(1, 41), 1)]);
    assert_eq!(full(&s).free, 12);
    let plan = run_step(&mut s).0;
    assert_eq!((plan.request_id, full(&s).promised), (vec![1], 0));
    let plan = run_step(&mut s).0;
    assert_eq!(
        plan.admitted,
        [2],
        "the first one's pages can be evicted now"
    );
}

#[test]
fn automatic_truncation_heeds_the_pool_as_well() {
    let mut s = scheduler(SchedulerConfig {
        auto_truncate: true,
        num_pages: 8,
        ..config()
    });
    s.submit(vec![
        spec(1, prompt(0, 100), 5),
        part_of(2, &prompt(0, 100), 9),
    ]);
    s.extend_prompt(2, &prompt(0, 100)[9..]);
    let mut prompt_lens = Vec::new();
    while s.has_work() {
        prompt_lens.extend(run_step(&mut s).1.prompt_lens);
    }
    // 28 and the first four of five tokens fill the pool.
    assert_eq!(prompt_lens, [28; 10]);
}

#[test]
fn a_plan_that_no_index_could_address_is_refused() {
    let wide = SchedulerConfig {
        max_running_requests: 1 << 28,
        draft_len: 255,
        ..config()
    };
    let refused = Scheduler::new(wide).unwrap_err().to_string();
    assert!(refused.contains("max_running_requests"), "{refused}");
}
