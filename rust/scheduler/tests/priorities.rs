//! Who goes first for whom: priority classes, preemption, a full queue, tenants.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::steps::{admissions, one_by_one, run_step, scheduler};
use common::{config, prompt, spec};
use dsserve_scheduler::{FinishCode, Policy, PriorityConfig, RequestSpec, SchedulerConfig};

fn priorities(preemption: bool) -> SchedulerConfig {
    SchedulerConfig {
        max_running_requests: 3,
        chunked_prefill_size: 64,
        priority: PriorityConfig {
            enabled: true,
            preemption,
            preemption_threshold: 5,
            ..PriorityConfig::default()
        },
        ..config()
    }
}

fn urgent(request_id: u64, priority: i32) -> RequestSpec {
    RequestSpec {
        priority: Some(priority),
        ..spec(
            request_id,
            prompt(u32::try_from(request_id).unwrap(), 9),
            50,
        )
    }
}

#[test]
fn classes_come_before_the_policy_and_no_priority_is_the_last_class() {
    for (low_values_first, expected) in [(false, [3, 1, 2]), (true, [1, 3, 2])] {
        let mut s = scheduler(SchedulerConfig {
            priority: PriorityConfig {
                enabled: true,
                low_values_first,
                ..PriorityConfig::default()
            },
            ..one_by_one(Policy::ShortestPrefillFirst)
        });
        s.submit(vec![urgent(1, -2), spec(2, prompt(2, 8), 50), urgent(3, 4)]);
        assert_eq!(admissions(&mut s, 3), expected);
    }
}

#[test]
fn the_newest_of_the_least_urgent_makes_room() {
    let mut s = scheduler(priorities(true));
    s.submit(vec![urgent(1, 2), urgent(2, 1), urgent(3, 1)]);
    run_step(&mut s);
    s.submit(vec![urgent(4, 7)]);
    let (plan, _) = run_step(&mut s);
    assert_eq!(
        plan.admitted,
        [4],
        "nothing is in flight: the place is free at once"
    );
    assert_eq!(s.stats().counters.preempted, 1);
    let (plan, _) = run_step(&mut s);
    assert_eq!(
        plan.request_id,
        [1, 2, 4],
        "3 was the newest of the least urgent"
    );
    s.abort(&[1]).unwrap();
    assert_eq!(
        run_step(&mut s).0.admitted,
        [3],
        "it goes on when there is room"
    );
}

#[test]
fn a_difference_within_the_threshold_preempts_nobody() {
    let mut s = scheduler(priorities(true));
    s.submit(vec![urgent(1, 2), urgent(2, 2), urgent(3, 2)]);
    run_step(&mut s);
    s.submit(vec![urgent(4, 7)]);
    assert!(run_step(&mut s).0.admitted.is_empty());
    assert_eq!(s.stats().counters.preempted, 0);
}

#[test]
fn nobody_is_preempted_in_the_step_that_computes_the_rest_of_its_prompt() {
    let mut s = scheduler(SchedulerConfig {
        max_running_requests: 1,
        chunked_prefill_size: 24,
        ..priorities(true)
    });
    s.submit(vec![RequestSpec {
        priority: Some(1),
        ..spec(1, prompt(1, 40), 50)
    }]);
    run_step(&mut s);
    // Short enough for what the step has left.
    s.submit(vec![RequestSpec {
        priority: Some(20),
        ..spec(2, prompt(2, 5), 50)
    }]);
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    assert_eq!((&plan.request_id[..], plan.samples[0]), (&[1][..], 1));
    assert_eq!(s.stats().counters.preempted, 0, "its rows are in the plan");
    s.check_invariants().unwrap();
    common::steps::apply(&mut s, &plan);
    assert_eq!(run_step(&mut s).0.admitted, [2]);
}

#[test]
fn order_only_preempts_nobody() {
    let mut s = scheduler(priorities(false));
    s.submit(vec![urgent(1, 2), urgent(2, 2), urgent(3, 2)]);
    run_step(&mut s);
    s.submit(vec![urgent(4, 90)]);
    assert!(run_step(&mut s).0.admitted.is_empty());
}

#[test]
fn nobody_is_preempted_who_cannot_make_enough_room() {
    let mut s = scheduler(SchedulerConfig {
        num_pages: 20,
        conservativeness: 0.0,
        ..priorities(true)
    });
    s.submit(vec![
        RequestSpec {
            priority: Some(9),
            ..spec(1, prompt(1, 40), 20)
        },
        urgent(2, 1),
    ]);
    run_step(&mut s);
    // 13 pages, of which the less urgent one could free 3 of the 20 - 10 - 3 = 7 free.
    s.submit(vec![RequestSpec {
        priority: Some(10),
        ..spec(3, prompt(3, 52), 4)
    }]);
    assert!(run_step(&mut s).0.admitted.is_empty());
    assert_eq!(s.stats().counters.preempted, 0);
}

#[test]
fn a_full_queue_drops_its_least_urgent_request() {
    let mut s = scheduler(SchedulerConfig {
        max_queued_requests: Some(2),
        ..priorities(true)
    });
    assert!(s.submit(vec![urgent(1, 3), urgent(2, 1)]).is_empty());
    assert_eq!(s.submit(vec![urgent(3, 1)])[0].code, "queue_full");
    assert!(s.submit(vec![urgent(4, 2)]).is_empty());
    let outputs = s.take_outputs();
    assert_eq!(outputs.request_ids, [2]);
    assert_eq!(outputs.finish_codes, [FinishCode::Dropped]);
    assert_eq!(s.num_waiting(), 2);
    s.check_invariants().unwrap();
}

#[test]
fn a_priority_is_refused_where_the_server_says_so() {
    let mut s = scheduler(SchedulerConfig {
        priority: PriorityConfig {
            refuse_when_disabled: true,
            ..PriorityConfig::default()
        },
        ..config()
    });
    assert_eq!(s.submit(vec![urgent(1, 0)])[0].code, "priority_disabled");
    assert!(s.submit(vec![spec(2, prompt(0, 8), 5)]).is_empty());
}

fn of_tenant(request_id: u64, tenant: u64, max_new_tokens: u32) -> RequestSpec {
    RequestSpec {
        tenant,
        ..spec(
            request_id,
            prompt(u32::try_from(request_id).unwrap(), 100),
            max_new_tokens,
        )
    }
}

#[test]
fn a_flood_of_one_tenant_does_not_delay_another_one_by_more_than_a_turn() {
    let mut s = scheduler(SchedulerConfig {
        fair: true,
        chunked_prefill_size: 128,
        max_prefill_tokens: 128,
        ..one_by_one(Policy::Fcfs)
    });
    let mut requests: Vec<_> = (1..40).map(|id| of_tenant(id, 1, 90)).collect();
    requests.extend((40..45).map(|id| of_tenant(id, 2, 90)));
    s.submit(requests);
    let order = admissions(&mut s, 12);
    let of_second = order.iter().filter(|id| **id >= 40).count();
    assert_eq!(of_second, 5, "{order:?}");
}

#[test]
fn output_is_charged_too() {
    let mut s = scheduler(SchedulerConfig {
        fair: true,
        max_running_requests: 2,
        chunked_prefill_size: 128,
        ..one_by_one(Policy::Fcfs)
    });
    // Tenant 1 asks for few prompts and long answers, tenant 2 for the opposite.
    let mut requests = Vec::new();
    for index in 0..40 {
        requests.push(of_tenant(100 + index, 1, 99));
        requests.push(of_tenant(200 + index, 2, 1));
    }
    s.submit(requests);
    let mut used = [0_i64, 0];
    while s.num_waiting() > 10 && used[1] < 3_000 {
        let (plan, outputs) = run_step(&mut s);
        for id in plan.admitted {
            used[usize::from(id >= 200)] += 100;
        }
        for (index, id) in outputs.request_ids.iter().enumerate() {
            let offsets = &outputs.token_offsets;
            used[usize::from(*id >= 200)] += i64::from(offsets[index + 1] - offsets[index]);
        }
    }
    // A turn and a request of either.
    assert!((used[0] - used[1]).abs() <= 512 + 200, "{used:?}");
}
