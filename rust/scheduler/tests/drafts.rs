//! Steps with drafts: runs of ids, stops inside them, pages ahead.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::steps::scheduler;
use common::{config, prompt, spec};
use dsserve_scheduler::{
    FinishCode, Phase, RequestSpec, Scheduler, SchedulerConfig, SchedulerError, StepPlan, MASKED,
    SAMPLED,
};

/// Ends a sequence, as results have it.
const EOS: i32 = 1;

fn drafting(draft_len: u32) -> SchedulerConfig {
    SchedulerConfig {
        draft_len,
        ..config()
    }
}

/// Request 1 with its prompt of 9 tokens computed and one token out.
fn started(request: RequestSpec) -> Scheduler {
    let mut s = scheduler(drafting(3));
    assert!(s.submit(vec![request]).is_empty());
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    s.apply_runs(plan.step_id, &[6], &[1], &[0], 0).unwrap();
    s
}

fn verify(s: &mut Scheduler) -> StepPlan {
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    assert_eq!(plan.phase, Phase::Verify);
    plan
}

#[test]
fn a_verify_row_has_its_anchor_and_drafts_behind_it() {
    let mut s = started(spec(1, prompt(0, 9), 50));
    let plan = verify(&mut s);
    assert_eq!(plan.token_ids, [6, -1, -1, -1]);
    assert_eq!(plan.positions, [9, 10, 11, 12]);
    assert_eq!(
        (&plan.draft_len[..], &plan.tail_len[..]),
        (&[3][..], &[4][..])
    );
    assert_eq!(
        (plan.totals.sampling_rows, plan.totals.draft_tokens),
        (1, 3)
    );
}

#[test]
fn positions_are_upper_bounds_until_the_accepted_length_is_known() {
    let mut s = started(spec(1, prompt(0, 9), 50));
    let first = verify(&mut s);
    let second = verify(&mut s);
    assert_eq!((second.start_position[0], second.token_ids[0]), (13, -1));
    let outputs = s.apply_runs(first.step_id, &[7, 8], &[2], &[0], 0).unwrap();
    assert_eq!(outputs.token_ids, [7, 8]);
    let outputs = s.apply_runs(second.step_id, &[9], &[1], &[0], 0).unwrap();
    assert_eq!((outputs.token_ids, outputs.output_lens), (vec![9], vec![4]));
    let third = verify(&mut s);
    assert_eq!((third.start_position[0], third.token_ids[0]), (12, 9));
    let counters = s.stats().counters;
    assert_eq!((counters.draft_tokens, counters.accepted_tokens), (9, 1));
}

#[test]
fn a_run_ends_at_the_first_stop_token() {
    let request = RequestSpec {
        ignore_eos: false,
        ..spec(1, prompt(0, 9), 50)
    };
    let mut s = started(request);
    let plan = verify(&mut s);
    let outputs = s
        .apply_runs(plan.step_id, &[7, EOS, 8, EOS], &[4], &[0], 0)
        .unwrap();
    assert_eq!(outputs.token_ids, [7, 1]);
    assert_eq!(
        (outputs.finish_codes[0], outputs.output_lens[0]),
        (FinishCode::StopToken, 3)
    );
    // 12 tokens count, and all have KV: three pages, though the run wrote into a fourth.
    assert_eq!(s.pool_table()[0].evictable, 3);
    s.check_invariants().unwrap();
}

#[test]
fn a_stop_beyond_the_limit_is_a_length_finish() {
    let request = RequestSpec {
        ignore_eos: false,
        ..spec(1, prompt(0, 9), 3)
    };
    let mut s = started(request);
    let plan = verify(&mut s);
    assert_eq!(
        plan.draft_len,
        [1],
        "two tokens may come, so one draft is of use"
    );
    let outputs = s.apply_runs(plan.step_id, &[7, 8], &[2], &[0], 0).unwrap();
    assert_eq!(outputs.finish_codes, [FinishCode::Length]);

    let mut s = started(RequestSpec {
        ignore_eos: false,
        ..spec(1, prompt(0, 9), 5)
    });
    let first = verify(&mut s);
    let second = verify(&mut s);
    assert_eq!((first.draft_len[0], second.draft_len[0]), (3, 2));
    s.apply_runs(first.step_id, &[7, 7, 7], &[3], &[0], 0)
        .unwrap();
    let outputs = s
        .apply_runs(second.step_id, &[7, EOS], &[2], &[0], 0)
        .unwrap();
    assert_eq!(outputs.token_ids, [7]);
    assert_eq!(
        (outputs.finish_codes[0], outputs.output_lens[0]),
        (FinishCode::Length, 5)
    );
}

#[test]
fn min_new_tokens_counts_inside_a_run() {
    let request = RequestSpec {
        ignore_eos: false,
        min_new_tokens: 4,
        ..spec(1, prompt(0, 9), 50)
    };
    let mut s = started(request);
    let plan = verify(&mut s);
    let outputs = s
        .apply_runs(plan.step_id, &[EOS, 7, EOS, 8], &[4], &[0], 0)
        .unwrap();
    assert_eq!(outputs.token_ids, [1, 7, 1]);
    assert_eq!(outputs.finish_codes, [FinishCode::StopToken]);
}

#[test]
fn runs_that_no_row_can_bring_are_refused_and_change_nothing() {
    let mut s = started(spec(1, prompt(0, 9), 50));
    let plan = verify(&mut s);
    for (ids, count) in [(&[5; 5][..], 5), (&[][..], 0)] {
        let refused = s
            .apply_runs(plan.step_id, ids, &[count], &[0], 0)
            .unwrap_err();
        assert!(matches!(
            refused,
            SchedulerError::WrongRunLen {
                request_id: 1,
                most: 4,
                ..
            }
        ));
    }
    let refused = s
        .apply_runs(plan.step_id, &[5; 3], &[2], &[0], 0)
        .unwrap_err();
    assert!(matches!(refused, SchedulerError::WrongResultLen { .. }));
    assert_eq!(s.steps_in_flight(), 1);
    s.apply_runs(plan.step_id, &[5; 4], &[4], &[0], 0).unwrap();
}

#[test]
fn what_is_known_before_a_result_is_the_same_after_it() {
    let plan_after = |applies_first: bool| {
        let mut s = scheduler(drafting(2));
        s.submit(vec![spec(1, prompt(0, 11), 30), spec(2, prompt(1, 9), 30)]);
        let first = s.next_plan(0).unwrap().unwrap().clone();
        if applies_first {
            s.apply_runs(first.step_id, &[6, 6], &[1, 1], &[0, 0], 0)
                .unwrap();
        }
        s.next_plan(0).unwrap().unwrap().clone()
    };
    let (before, after) = (plan_after(false), plan_after(true));
    assert_eq!(before.token_ids, [-1; 6]);
    let ids_forgotten = StepPlan {
        token_ids: before.token_ids.clone(),
        ..after
    };
    assert_eq!(before, ids_forgotten, "S16");
}

#[test]
fn rows_that_wait_for_a_mask_are_marked_in_every_kind_of_step() {
    let masked = RequestSpec {
        needs_mask: true,
        ..spec(1, prompt(0, 9), 50)
    };
    let mut s = scheduler(drafting(2));
    s.submit(vec![masked, spec(2, prompt(1, 9), 50)]);
    for phase in [Phase::Prefill, Phase::Verify] {
        let plan = s.next_plan(0).unwrap().unwrap();
        assert_eq!(plan.phase, phase);
        assert_eq!(plan.samples, [SAMPLED | MASKED, SAMPLED]);
    }
}
