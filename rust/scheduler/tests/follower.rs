//! S6: a follower keeps the leader's page table from plans alone, and notices when it cannot.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::steps::{apply, run_step, scheduler};
use common::{config, prompt, spec};
use dsserve_scheduler::{Follower, FollowerError, Scheduler, SchedulerConfig, StepPlan};

fn leader() -> (Scheduler, Follower) {
    let s = scheduler(SchedulerConfig {
        group_id: 2,
        ..config()
    });
    let follower = Follower::new(2, s.plan_capacity());
    (s, follower)
}

/// Three plans: two requests start, go on, and one of them ends.
fn plans() -> (Vec<StepPlan>, Follower) {
    let (mut s, follower) = leader();
    s.submit(vec![spec(1, prompt(0, 9), 2), spec(2, prompt(1, 7), 9)]);
    let plans = (0..4).map(|_| run_step(&mut s).0).collect();
    (plans, follower)
}

#[test]
fn a_follower_has_the_pages_of_every_plan_and_forgets_those_of_released_slots() {
    let (plans, mut follower) = plans();
    for plan in &plans {
        follower.follow(plan).unwrap();
        for [slot, column, page] in &plan.page_deltas {
            let place = |value: &i32| u32::try_from(*value).unwrap();
            let known = follower.page(place(slot), place(column));
            assert_eq!(known, Some(place(page)));
        }
    }
    let released: Vec<i32> = plans
        .iter()
        .flat_map(|p| p.released_slots.clone())
        .collect();
    assert_eq!(released.len(), 1, "one request ended");
    let slot = u32::try_from(released[0]).unwrap();
    assert_eq!(follower.page(slot, 0), None);
}

#[test]
fn a_plan_that_is_missing_or_comes_twice_is_noticed() {
    let (plans, mut follower) = plans();
    follower.follow(&plans[0]).unwrap();
    let error = follower.clone().follow(&plans[2]).unwrap_err();
    assert_eq!(
        error,
        FollowerError::Sequence {
            expected: 2,
            found: 3
        }
    );
    assert!(matches!(
        follower.follow(&plans[0]),
        Err(FollowerError::Sequence { .. })
    ));
}

#[test]
fn a_plan_of_another_group_is_refused() {
    let (plans, _) = plans();
    let (s, _) = leader();
    let mut other = Follower::new(1, s.plan_capacity());
    assert!(matches!(
        other.follow(&plans[0]),
        Err(FollowerError::Group {
            expected: 1,
            found: 2,
            ..
        })
    ));
}

#[test]
fn any_changed_entry_changes_the_digest() {
    let (plans, follower) = plans();
    let changes: [fn(&mut StepPlan); 4] = [
        |plan| plan.page_deltas[0][2] += 1,
        |plan| plan.page_deltas[1][1] += 5,
        |plan| {
            plan.page_deltas.pop();
        },
        |plan| plan.request_id[0] += 7,
    ];
    for change in changes {
        let mut plan = plans[0].clone();
        change(&mut plan);
        let error = follower.clone().follow(&plan).unwrap_err();
        assert!(matches!(error, FollowerError::Digest { .. }), "{error}");
    }
    let mut forgetful = follower.clone();
    let missed = plans
        .iter()
        .position(|plan| !plan.released_slots.is_empty());
    for (index, plan) in plans.iter().enumerate() {
        let mut plan = plan.clone();
        plan.released_slots.clear();
        let result = forgetful.follow(&plan);
        assert_eq!(result.is_err(), Some(index) == missed);
        if result.is_err() {
            break;
        }
    }
}

#[test]
fn slots_and_columns_outside_the_table_are_named() {
    let (plans, follower) = plans();
    let changes: [fn(&mut StepPlan); 4] = [
        |plan| plan.page_deltas[0][0] = 0,
        |plan| plan.page_deltas[0][1] = -1,
        |plan| plan.released_slots.push(99),
        |plan| plan.request_slot[1] = plan.request_slot[0],
    ];
    for change in changes {
        let mut plan = plans[0].clone();
        change(&mut plan);
        let error = follower.clone().follow(&plan).unwrap_err();
        assert!(
            matches!(error, FollowerError::Table { step_id: 1, .. }),
            "{error}"
        );
    }
}

#[test]
fn pages_that_the_tree_had_already_are_followed_too() {
    let mut s = scheduler(SchedulerConfig {
        inbatch_prefix_hold: 0,
        chunked_prefill_size: 64,
        ..config()
    });
    let mut follower = Follower::new(0, s.plan_capacity());
    // Equal prompts in one step, nobody held back: the second one's pages are duplicates.
    s.submit(vec![spec(1, prompt(0, 20), 6), spec(2, prompt(0, 20), 6)]);
    let mut rewritten = 0;
    while s.has_work() {
        let plan = s.next_plan(0).unwrap().unwrap().clone();
        follower.follow(&plan).unwrap();
        let is_first = |delta: &&[i32; 3]| delta[1] == 0;
        rewritten += plan.page_deltas.iter().filter(is_first).count();
        apply(&mut s, &plan);
        s.check_invariants().unwrap();
    }
    assert_eq!(rewritten, 3, "two first columns, and one of them again");
}
