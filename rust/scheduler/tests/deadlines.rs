//! Deadlines and timeouts on the clock that the scheduler is told.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::steps::{apply, scheduler};
use common::{config, prompt, spec};
use dsserve_scheduler::{FinishCode, Policy, RequestSpec, Scheduler, SchedulerConfig, StepPlan};

fn until(request_id: u64, deadline_us: u64) -> RequestSpec {
    RequestSpec {
        deadline_us: Some(deadline_us),
        ..spec(request_id, prompt(0, 9), 50)
    }
}

fn plan_at(s: &mut Scheduler, now_us: u64) -> Option<StepPlan> {
    s.next_plan(now_us).unwrap().cloned()
}

#[test]
fn waiting_past_the_deadline_ends_without_running() {
    let mut s = scheduler(SchedulerConfig {
        max_running_requests: 1,
        ..config()
    });
    s.submit(vec![spec(1, prompt(1, 8), 50), until(2, 100)]);
    let plan = plan_at(&mut s, 99).unwrap();
    assert!(s.take_outputs().is_empty());
    apply(&mut s, &plan);
    plan_at(&mut s, 100);
    let outputs = s.take_outputs();
    assert_eq!(
        (outputs.request_ids, outputs.output_lens),
        (vec![2], vec![0])
    );
    assert_eq!(outputs.finish_codes, [FinishCode::Deadline]);
    s.check_invariants().unwrap();
}

#[test]
fn running_past_the_deadline_ends_with_what_there_is_and_its_late_result_is_dropped() {
    let mut s = scheduler(config());
    s.submit(vec![until(1, 100)]);
    let first = plan_at(&mut s, 0).unwrap();
    let second = plan_at(&mut s, 0).unwrap();
    apply(&mut s, &first);
    assert_eq!(plan_at(&mut s, 100), None);
    let outputs = s.take_outputs();
    assert_eq!(outputs.finish_codes, [FinishCode::Deadline]);
    assert_eq!(outputs.output_lens, [1]);
    assert!(s.has_work(), "its last step is in flight");
    assert!(apply(&mut s, &second).is_empty());
    assert!(!s.has_work());
    for pool in s.pool_table() {
        assert_eq!(pool.available(), pool.capacity);
    }
}

#[test]
fn timeouts_of_the_server_count_from_arrival_and_from_admission() {
    let mut s = scheduler(SchedulerConfig {
        max_running_requests: 1,
        waiting_timeout_us: Some(50),
        running_timeout_us: Some(200),
        ..config()
    });
    let arrived = |id: u64, arrival_us: u64| RequestSpec {
        arrival_us,
        ..spec(id, prompt(u32::try_from(id).unwrap(), 8), 50)
    };
    s.submit(vec![arrived(1, 10), arrived(2, 20)]);
    let plan = plan_at(&mut s, 40).unwrap();
    apply(&mut s, &plan);
    let plan = plan_at(&mut s, 70).unwrap();
    assert_eq!(s.take_outputs().request_ids, [2], "it waited from 20 to 70");
    apply(&mut s, &plan);
    let plan = plan_at(&mut s, 239).unwrap();
    apply(&mut s, &plan);
    assert_eq!(plan_at(&mut s, 240), None, "admitted at 40, and 200 later");
    assert_eq!(s.take_outputs().request_ids, [1]);
}

#[test]
fn time_does_not_run_backwards() {
    let mut s = scheduler(config());
    s.submit(vec![until(1, 100)]);
    let plan = plan_at(&mut s, 90).unwrap();
    s.apply(plan.step_id, &[5], &[0], 20).unwrap();
    plan_at(&mut s, 0);
    assert!(s.take_outputs().is_empty());
    assert_eq!(s.submit(vec![until(2, 89)])[0].code, "deadline_exceeded");
}

#[test]
fn a_start_that_comes_too_late_is_refused_once_the_rate_is_known() {
    let mut s = scheduler(SchedulerConfig {
        max_running_requests: 1,
        num_pages: 200,
        ..config()
    });
    assert!(
        s.submit(vec![until(1, 5_000)]).is_empty(),
        "nothing was measured yet"
    );
    let plan = plan_at(&mut s, 0).unwrap();
    s.apply(plan.step_id, &[5], &[0], 900).unwrap(); // 9 tokens in 900 us
    s.submit(vec![spec(2, prompt(2, 40), 5)]);
    // 40 tokens are queued: 4,000 us.
    let refused = s.submit(vec![until(3, 4_800)]);
    assert_eq!(refused[0].code, "deadline_unreachable");
    assert!(
        refused[0].message.contains("about 4 ms"),
        "{}",
        refused[0].message
    );
    assert!(s.submit(vec![until(4, 5_000)]).is_empty());
    s.abort(&[2]).unwrap();
    assert!(
        s.submit(vec![until(5, 2_000)]).is_empty(),
        "9 tokens are queued"
    );
}

#[test]
fn more_urgent_requests_do_not_wait_for_less_urgent_ones() {
    let mut config = SchedulerConfig {
        max_running_requests: 1,
        num_pages: 200,
        ..config()
    };
    config.priority.enabled = true;
    let mut s = scheduler(config);
    let with = |priority: i32, spec: RequestSpec| RequestSpec {
        priority: Some(priority),
        ..spec
    };
    s.submit(vec![with(5, spec(1, prompt(1, 10), 50))]);
    let plan = plan_at(&mut s, 0).unwrap();
    s.apply(plan.step_id, &[5], &[0], 1_000).unwrap();
    s.submit(vec![with(5, spec(2, prompt(2, 40), 5))]);
    assert_eq!(
        s.submit(vec![with(4, until(3, 2_000))])[0].code,
        "deadline_unreachable"
    );
    assert!(s.submit(vec![with(6, until(4, 2_000))]).is_empty());
}

#[test]
fn a_queue_of_cached_prompts_is_short_under_every_policy() {
    for policy in [Policy::Fcfs, Policy::Lpm] {
        let mut s = scheduler(SchedulerConfig {
            policy,
            num_pages: 200,
            max_running_requests: 1,
            ..config()
        });
        let mut now_us = 0;
        let mut run = |s: &mut Scheduler| {
            let plan = plan_at(s, now_us).expect("a step");
            now_us += 1_000;
            let ids: Vec<i32> = plan
                .samples
                .iter()
                .map(|n| if *n > 0 { 5 } else { -1 })
                .collect();
            let status = vec![0; ids.len()];
            s.apply(plan.step_id, &ids, &status, now_us).unwrap();
        };
        let of_prefix = |id: u32| {
            let ids = [prompt(3, 160), prompt(id, 4)].concat();
            spec(u64::from(id), ids, 1)
        };
        s.submit(vec![spec(1, prompt(3, 160), 1)]);
        while s.has_work() {
            run(&mut s);
        }
        s.submit((10..30).map(of_prefix).collect());
        run(&mut s);
        let soon = RequestSpec {
            deadline_us: Some(80_000),
            ..of_prefix(40)
        };
        assert_eq!(
            s.submit(vec![soon]),
            [],
            "{policy:?}: 20 prompts of 4 new tokens"
        );
    }
}
