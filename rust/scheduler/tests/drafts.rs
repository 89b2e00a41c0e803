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
fn a_request_may_want_fewer_drafts_or_none() {
    let wanting = |id, draft_len| RequestSpec {
        draft_len,
        ..spec(id, prompt(u32::try_from(id).unwrap(), 7), 50)
    };
    let mut s = scheduler(drafting(3));
    let requests = vec![wanting(1, None), wanting(2, Some(0)), wanting(3, Some(1))];
    assert!(s.submit(requests).is_empty());
    let prefill = s.next_plan(0).unwrap().unwrap().clone();
    s.apply_runs(prefill.step_id, &[6; 3], &[1; 3], &[0; 3], 0)
        .unwrap();
    let first = verify(&mut s);
    assert_eq!(first.draft_len, [3, 0, 1]);
    assert_eq!(first.cu_seqlens, [0, 4, 5, 7]);
    assert_eq!(first.tail_len, [4, 1, 2]);
    assert_eq!(first.token_ids, [6, -1, -1, -1, 6, 6, -1]);
    assert_eq!(
        pages_sent(&first, 2),
        0,
        "its prompt's second page holds the anchor: none is ahead"
    );
    let second = verify(&mut s);
    // Where nothing is drafted the position is known without the result.
    assert_eq!(second.start_position, [11, 8, 9]);
    s.apply_runs(first.step_id, &[7, 7, 7, 7], &[2, 1, 1], &[0; 3], 0)
        .unwrap();
    let too_many = s.apply_runs(second.step_id, &[8; 4], &[1, 2, 1], &[0; 3], 0);
    assert!(matches!(
        too_many.unwrap_err(),
        SchedulerError::WrongRunLen {
            request_id: 2,
            most: 1,
            given: 2,
            ..
        }
    ));
}

/// Page-table entries that the step writes for the request in a slot.
fn pages_sent(plan: &StepPlan, slot: i32) -> usize {
    let deltas = plan.page_deltas.iter();
    deltas.filter(|[of, ..]| *of == slot).count()
}

#[test]
fn more_drafts_than_the_server_has_are_refused() {
    for (draft_len, wanted, is_refused) in
        [(3, 3, false), (3, 4, true), (0, 0, false), (0, 1, true)]
    {
        let mut s = scheduler(drafting(draft_len));
        let request = RequestSpec {
            draft_len: Some(wanted),
            ..spec(1, prompt(0, 9), 50)
        };
        let codes: Vec<_> = s.submit(vec![request]).iter().map(|r| r.code).collect();
        let expected: &[&str] = if is_refused {
            &["invalid_draft_len"]
        } else {
            &[]
        };
        assert_eq!(codes, expected, "{wanted} of {draft_len}");
    }
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
