//! Situations in which the scheduler once did the wrong thing.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use std::collections::HashSet;

use common::steps::{admissions, apply, one_by_one, run_step, scheduler};
use common::{config, prompt, spec};
use dsserve_scheduler::{
    FinishCode, Policy, PriorityConfig, RequestSpec, Scheduler, SchedulerConfig, STATUS_NAN,
    STATUS_OK,
};

/// A request of a priority that may end by itself, so that only a share of its output is reserved.
fn of_priority(id: u32, prompt_len: u32, max_new_tokens: u32, priority: i32) -> RequestSpec {
    RequestSpec {
        priority: Some(priority),
        ignore_eos: false,
        ..spec(u64::from(id), prompt(id, prompt_len), max_new_tokens)
    }
}

fn preempting(config: &SchedulerConfig) -> Scheduler {
    scheduler(SchedulerConfig {
        context_length: 400,
        eos_token_ids: Vec::new(),
        inbatch_prefix_hold: 0,
        priority: PriorityConfig {
            enabled: true,
            ..PriorityConfig::default()
        },
        ..config.clone()
    })
}

#[test]
fn who_is_preempted_does_not_come_back_in_the_same_step() {
    let mut s = preempting(&SchedulerConfig {
        policy: Policy::ShortestPrefillFirst,
        mixed_chunk: true,
        num_pages: 50,
        max_running_requests: 5,
        chunked_prefill_size: 100,
        max_prefill_tokens: 4_000,
        prefill_max_defer: 20,
        conservativeness: 0.0,
        ..config()
    });
    for request in [(1, 8, 30, 0), (4, 60, 30, 5), (2, 120, 4, 30)] {
        let (id, prompt_len, max_new_tokens, priority) = request;
        s.submit(vec![of_priority(id, prompt_len, max_new_tokens, priority)]);
        run_step(&mut s);
    }
    s.submit(vec![of_priority(3, 20, 4, 40)]);
    let (plan, outputs) = run_step(&mut s);
    assert!(s.stats().counters.preempted > 0, "the situation is the one");
    let ids: HashSet<u64> = plan.request_id.iter().copied().collect();
    assert_eq!(ids.len(), plan.request_id.len(), "{:?}", plan.request_id);
    assert_eq!(outputs.request_ids.len(), {
        let ids: HashSet<_> = outputs.request_ids.iter().collect();
        ids.len()
    });
    assert!(!ids.contains(&1), "it was preempted");
    s.check_invariants().unwrap();
}

#[test]
fn requests_that_come_and_go_leave_nothing_behind() {
    let policies = [Policy::Fcfs, Policy::Lof, Policy::Random, Policy::Lpm];
    for policy in policies {
        let mut s = scheduler(SchedulerConfig {
            policy,
            max_running_requests: 50,
            ..config()
        });
        for round in 0..10 {
            let ids = || round * 100..(round + 1) * 100;
            s.submit(ids().map(|id| spec(id, vec![7; 6], 1)).collect());
            if round % 2 == 0 {
                // They leave before anybody looked.
                s.abort(&ids().collect::<Vec<u64>>()).unwrap();
            }
            while s.has_work() {
                run_step(&mut s);
            }
            s.check_invariants()
                .unwrap_or_else(|error| panic!("{policy:?}: {error}"));
        }
    }
}

#[test]
fn a_failed_row_without_ids_ends_its_request_alone() {
    let mut s = scheduler(SchedulerConfig {
        draft_len: 3,
        ..config()
    });
    s.submit(vec![
        spec(1, prompt(1, 9), 20),
        spec(2, prompt(2, 9), 20),
        spec(3, prompt(3, 9), 20),
    ]);
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    assert_eq!(plan.request_id, [1, 2]);
    // The first has a NaN in its prompt, the second in its drafts.
    let status = [STATUS_NAN, STATUS_OK];
    let outputs = s.apply_runs(plan.step_id, &[5], &[0, 1], &status, 0);
    let outputs = outputs.unwrap();
    assert_eq!(outputs.request_ids, [1, 2]);
    assert_eq!(
        outputs.finish_codes,
        [FinishCode::ErrorNan, FinishCode::None]
    );
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    let outputs = s.apply_runs(plan.step_id, &[5], &[1], &[STATUS_OK], 0);
    assert_eq!(outputs.unwrap().request_ids, [3]);
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    assert_eq!(plan.request_id, [2, 3]);
    assert!(plan.draft_len.iter().all(|len| *len == 3));
    let no_ids = s.apply_runs(plan.step_id, &[5], &[0, 1], &[STATUS_OK; 2], 0);
    assert!(no_ids.is_err(), "a row that went well brings an id");
    let status = [STATUS_NAN, STATUS_OK];
    let outputs = s.apply_runs(plan.step_id, &[5, 6], &[0, 2], &status, 0);
    let outputs = outputs.unwrap();
    assert_eq!(
        (outputs.request_ids, outputs.finish_codes),
        (vec![2, 3], vec![FinishCode::ErrorNan, FinishCode::None])
    );
    s.check_invariants().unwrap();
}

#[test]
fn a_full_queue_drops_the_least_urgent_that_was_never_retracted() {
    let mut s = preempting(&SchedulerConfig {
        num_pages: 22,
        max_running_requests: 2,
        max_queued_requests: Some(2),
        chunked_prefill_size: 64,
        conservativeness: 0.0,
        ..config()
    });
    s.submit(vec![of_priority(1, 16, 60, 0), of_priority(2, 16, 60, 0)]);
    while s.stats().counters.retracted == 0 {
        run_step(&mut s);
    }
    // It needs more pages than are left, so that it waits before the retracted one.
    assert!(s.submit(vec![of_priority(3, 60, 20, 5)]).is_empty());
    assert_eq!(s.num_waiting(), 2);
    assert!(s.submit(vec![of_priority(4, 8, 4, 90)]).is_empty());
    let outputs = s.take_outputs();
    assert_eq!(
        outputs.request_ids,
        [3],
        "output of the other is being read"
    );
    assert_eq!(outputs.finish_codes, [FinishCode::Dropped]);
    // Now nobody less urgent is left who may be dropped.
    assert_eq!(
        s.submit(vec![of_priority(5, 8, 4, 90)])[0].code,
        "queue_full"
    );
}

#[test]
fn a_step_looks_at_so_many_requests_however_many_tenants_wait() {
    let mut s = scheduler(SchedulerConfig {
        fair: true,
        max_running_requests: 64,
        num_pages: 2_000,
        ..config()
    });
    let of_tenant = |tenant: u64| RequestSpec {
        tenant,
        ..spec(tenant, prompt(0, 40), 20)
    };
    s.submit((0..1_000).map(of_tenant).collect());
    run_step(&mut s);
    run_step(&mut s);
    // All but the first can use what it computes, so that each look holds one back.
    let held_back = s.stats().counters.held_back;
    assert!((100..=2 * (64 + 128)).contains(&held_back), "{held_back}");
    s.check_invariants().unwrap();
}

fn of_tenant(id: u64, tenant: u64, prompt_len: u32, max_new_tokens: u32) -> RequestSpec {
    RequestSpec {
        tenant,
        ..spec(
            id,
            prompt(u32::try_from(id).unwrap(), prompt_len),
            max_new_tokens,
        )
    }
}

fn shared_fairly(max_running_requests: u32) -> Scheduler {
    scheduler(SchedulerConfig {
        fair: true,
        max_running_requests,
        chunked_prefill_size: 1_024,
        max_prefill_tokens: 1_024,
        num_pages: 4_000,
        context_length: 8_000,
        ..one_by_one(Policy::Fcfs)
    })
}

/// Of the first `count` admissions, how many are of ids from `from` on.
fn share_of(s: &mut Scheduler, count: usize, from: u64) -> usize {
    let order = admissions(s, count);
    order.iter().filter(|id| **id >= from).count()
}

#[test]
fn nobody_pays_for_what_nobody_else_waited_for() {
    let mut s = shared_fairly(16);
    s.submit((1..=15).map(|id| of_tenant(id, 1, 10, 1_000)).collect());
    while s.has_work() {
        run_step(&mut s);
    }
    s.submit((100..160).map(|id| of_tenant(id, 1, 60, 1)).collect());
    s.submit((200..260).map(|id| of_tenant(id, 2, 60, 1)).collect());
    // Two turns of either.
    let share = share_of(&mut s, 32, 200);
    assert!((8..=24).contains(&share), "{share}");
    s.check_invariants().unwrap();
}

#[test]
fn debts_are_kept_while_another_tenant_waits_and_lapse_with_the_queue() {
    for empties_queue in [false, true] {
        let mut s = shared_fairly(1);
        s.submit(vec![of_tenant(1, 1, 10, 3_000)]);
        s.submit((2..60).map(|id| of_tenant(id, 2, 60, 1)).collect());
        // The one of tenant 1 runs while tenant 2 waits.
        while s.stats().counters.generated_tokens < 3_000 {
            run_step(&mut s);
        }
        if empties_queue {
            s.abort(&(2..60).collect::<Vec<u64>>()).unwrap();
        }
        s.submit((100..160).map(|id| of_tenant(id, 1, 60, 1)).collect());
        s.submit((200..260).map(|id| of_tenant(id, 2, 60, 1)).collect());
        let of_second = admissions(&mut s, 40)
            .iter()
            .filter(|id| **id < 100 || **id >= 200)
            .count();
        let expected = if empties_queue { 12..=28 } else { 40..=40 };
        assert!(expected.contains(&of_second), "{of_second}");
    }
}

#[test]
fn credit_lapses_when_its_tenant_has_nothing_waiting() {
    let mut s = shared_fairly(1);
    // While tenant 1 saves up for a long prompt, tenant 2 runs many short ones.
    s.submit(vec![of_tenant(1, 1, 6_000, 1)]);
    s.submit((200..400).map(|id| of_tenant(id, 2, 60, 1)).collect());
    assert_eq!(share_of(&mut s, 60, 200), 60);
    s.abort(&[1]).unwrap();
    run_step(&mut s);
    s.submit((100..160).map(|id| of_tenant(id, 1, 60, 1)).collect());
    let share = share_of(&mut s, 40, 200);
    assert!((12..=28).contains(&share), "{share}");
}

/// Thirty pages and chunks of 128 rows: prompts of about eighty tokens must preempt each other.
fn small_pool() -> Scheduler {
    preempting(&SchedulerConfig {
        num_pages: 30,
        max_running_requests: 8,
        chunked_prefill_size: 128,
        max_prefill_tokens: 128,
        conservativeness: 0.0,
        ..config()
    })
}

#[test]
fn nobody_is_preempted_for_pages_that_others_keep() {
    for shares in [true, false] {
        let mut s = small_pool();
        s.submit(vec![of_priority(1, 81, 16, 0)]);
        run_step(&mut s);
        let second = RequestSpec {
            token_ids: if shares { prompt(1, 82) } else { prompt(2, 9) },
            ..of_priority(2, 1, 16, 50)
        };
        s.submit(vec![second]);
        let hit = if shares { 80 } else { 0 };
        assert_eq!(run_step(&mut s).0.cached_len, [hit]);
        // It lacks a few pages. Of those of the first, the second keeps the 20 of its hit.
        s.submit(vec![of_priority(3, 50, 4, 20)]);
        let (plan, _) = run_step(&mut s);
        let preempted = s.stats().counters.preempted;
        assert_eq!(
            (preempted, plan.admitted.len()),
            if shares { (0, 0) } else { (1, 1) }
        );
        s.check_invariants().unwrap();
    }
}

#[test]
fn nobody_is_preempted_for_pages_that_the_urgent_request_hits() {
    let mut s = small_pool();
    s.submit(vec![of_priority(1, 81, 16, 0)]);
    run_step(&mut s);
    s.submit(vec![of_priority(3, 17, 16, 50)]);
    run_step(&mut s);
    // It hits 20 pages of the first and lacks 8: more than are free with the rest of the first.
    let mut token_ids = prompt(1, 80);
    token_ids.extend(prompt(2, 28));
    let urgent = RequestSpec {
        token_ids,
        ..of_priority(2, 1, 4, 50)
    };
    assert!(s.submit(vec![urgent]).is_empty());
    assert!(run_step(&mut s).0.admitted.is_empty());
    assert_eq!(s.stats().counters.preempted, 0);
    s.abort(&[3]).unwrap();
    let (plan, _) = run_step(&mut s);
    assert_eq!((s.stats().counters.preempted, plan.admitted), (0, vec![2]));
}

/// Runs two steps ahead; returns how often a row or a chunk had to sit a step out.
fn finish_with(num_pages: u32, chunked_prefill_size: i64) -> u64 {
    let mut s = scheduler(SchedulerConfig {
        policy: Policy::ShortestPrefillFirst,
        mixed_chunk: true,
        num_pages,
        chunked_prefill_size,
        prefill_max_defer: 4,
        inbatch_prefix_hold: 0,
        conservativeness: 0.0,
        eos_token_ids: Vec::new(),
        ..config()
    });
    let of_family = |id: u64, family: u32, prompt_len: u32, max_new_tokens: u32| RequestSpec {
        ignore_eos: false,
        ..spec(id, prompt(family, prompt_len), max_new_tokens)
    };
    s.submit(vec![of_family(1, 1, 14, 1)]);
    let mut launched = vec![s.next_plan(0).unwrap().expect("the first prompt").clone()];
    s.submit(vec![of_family(2, 1, 14, 8), of_family(3, 2, 60, 1)]);
    launched.push(s.next_plan(0).unwrap().expect("the same prompt").clone());
    s.submit(vec![of_family(4, 3, 11, 1)]);
    while s.has_work() || !launched.is_empty() {
        if let Some(step) = (!launched.is_empty()).then(|| launched.remove(0)) {
            apply(&mut s, &step);
            s.check_invariants().unwrap();
        }
        while launched.len() < 2 {
            let Some(plan) = s.next_plan(0).unwrap().cloned() else {
                break;
            };
            s.check_invariants().unwrap();
            launched.push(plan);
        }
        assert!(!launched.is_empty() || !s.has_work(), "S8");
    }
    s.stats().counters.stalled_rows
}

#[test]
fn a_prompt_waits_for_promised_pages_that_a_twin_locked() {
    // The second request goes over to the pages of the first, which had ended and were there to be
    // evicted for the rest of the third one's prompt.
    let sizes = || (20..64).step_by(4);
    let stalls = (20..40).flat_map(|pages| sizes().map(move |size| finish_with(pages, size)));
    assert!(stalls.sum::<u64>() > 0, "the situation is the one");
}
