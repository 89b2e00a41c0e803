//! Single rules of the scheduler, each in a situation made for it.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::harness::Harness;
use common::steps::{apply, run_step, scheduler};
use common::{config, prompt, spec, VOCAB};
use dsserve_scheduler::{
    FinishCode, Namespace, Phase, Policy, RequestSpec, Scheduler, SchedulerConfig, SchedulerError,
    StepPlan, STATUS_NAN, STATUS_OK,
};

fn code_of(scheduler: &mut Scheduler, spec: RequestSpec) -> &'static str {
    let rejections = scheduler.submit(vec![spec]);
    rejections.first().map_or("", |rejection| rejection.code)
}

#[test]
fn wrong_requests_are_refused_with_their_code() {
    let mut scheduler = scheduler(SchedulerConfig {
        num_pages: 20,
        max_queued_requests: Some(1),
        ..config()
    });
    let s = &mut scheduler;
    assert_eq!(code_of(s, spec(1, Vec::new(), 5)), "empty_prompt");
    assert_eq!(code_of(s, spec(1, vec![VOCAB], 5)), "invalid_token_id");
    assert_eq!(
        code_of(s, spec(1, prompt(0, 150), 51)),
        "context_length_exceeded"
    );
    assert_eq!(
        code_of(s, spec(1, prompt(0, 9), u32::MAX)),
        "context_length_exceeded"
    );
    assert_eq!(
        code_of(s, spec(1, prompt(0, 60), 22)),
        "pool_capacity_exceeded"
    );
    assert_eq!(
        code_of(s, spec(1, prompt(0, 60), 21)),
        "",
        "the last token needs no KV"
    );
    assert_eq!(code_of(s, spec(1, prompt(0, 8), 5)), "duplicate_request_id");
    assert_eq!(code_of(s, spec(2, prompt(0, 8), 5)), "queue_full");
    let counters = s.stats().counters;
    assert_eq!((counters.submitted, counters.rejected), (1, 7));
}

#[test]
fn every_wrong_configuration_value_is_named_at_once() {
    let wrong = SchedulerConfig {
        page_size: 3,
        num_pages: 0,
        window: 0,
        max_steps_in_flight: 3,
        conservativeness: f64::NAN,
        eos_token_ids: vec![VOCAB],
        ..config()
    };
    let message = Scheduler::new(wrong).unwrap_err().to_string();
    for name in [
        "page_size",
        "num_pages",
        "window",
        "max_steps_in_flight",
        "conservativeness",
        "eos_token_ids",
    ] {
        assert!(message.contains(name), "{name} is not in: {message}");
    }
}

#[test]
fn steps_are_applied_in_order_and_in_number() {
    let mut s = scheduler(config());
    s.submit(vec![spec(1, prompt(0, 8), 9)]);
    let first = s.next_plan(0).unwrap().unwrap().clone();
    let second = s.next_plan(0).unwrap().unwrap().clone();
    let refused = s.next_plan(0).unwrap_err();
    assert!(matches!(
        refused,
        SchedulerError::TooManySteps {
            in_flight: 2,
            limit: 2
        }
    ));
    let refused = s.apply(second.step_id, &[5], &[0], 0).unwrap_err();
    assert!(matches!(refused, SchedulerError::WrongStep { .. }));
    let refused = s.apply(first.step_id, &[5, 5], &[0, 0], 0).unwrap_err();
    assert!(matches!(refused, SchedulerError::WrongResultLen { .. }));
    assert_eq!(apply(&mut s, &first).len(), 1);
    assert_eq!(apply(&mut s, &second).len(), 1);
}

#[test]
fn an_unapplied_token_is_a_placeholder_and_an_applied_one_is_not() {
    let mut s = scheduler(config());
    s.submit(vec![spec(1, prompt(0, 8), 9)]);
    let prefill = s.next_plan(0).unwrap().unwrap().clone();
    let decode = s.next_plan(0).unwrap().unwrap().clone();
    assert_eq!(
        (decode.phase, &decode.token_ids[..]),
        (Phase::Decode, &[-1][..])
    );
    assert_eq!(
        (&decode.positions[..], decode.history_ids[0]),
        (&[8][..], [-2; 3])
    );
    apply(&mut s, &prefill);
    apply(&mut s, &decode);
    assert_eq!(s.next_plan(0).unwrap().unwrap().token_ids, [5]);
}

#[test]
fn a_plan_is_the_same_before_and_after_the_result_of_the_step_in_flight() {
    let start = |early: bool| {
        let mut s = scheduler(config());
        s.submit(vec![spec(1, prompt(0, 11), 9), spec(2, prompt(1, 9), 9)]);
        let first = s.next_plan(0).unwrap().unwrap().clone();
        if early {
            return s.next_plan(0).unwrap().unwrap().clone();
        }
        apply(&mut s, &first);
        s.next_plan(0).unwrap().unwrap().clone()
    };
    let (before, mut after) = (start(true), start(false));
    assert_eq!(before.token_ids, [-1, -1]);
    after.token_ids.fill(-1);
    assert_eq!(before, after);
}

#[test]
fn a_request_that_ends_by_length_is_not_planned_again() {
    let mut s = scheduler(config());
    s.submit(vec![spec(1, prompt(0, 8), 1)]);
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    assert!(s.next_plan(0).unwrap().is_none());
    assert_eq!(apply(&mut s, &plan).finish_codes, [FinishCode::Length]);
    assert!(!s.has_work());
}

#[test]
fn a_stopped_request_in_flight_keeps_slot_and_pages_until_applied() {
    let mut s = scheduler(config());
    let stops = RequestSpec {
        stop_token_ids: vec![5],
        ..spec(1, prompt(0, 10), 50)
    };
    s.submit(vec![stops]);
    let first = s.next_plan(0).unwrap().unwrap().clone();
    let second = s.next_plan(0).unwrap().unwrap().clone();
    assert_eq!(apply(&mut s, &first).finish_codes, [FinishCode::StopToken]);
    let pools = s.pool_table();
    assert_eq!((pools[0].quarantined, pools[0].locked), (1, 2), "{pools:?}");
    assert_eq!(pools[2].quarantined, 1);
    assert_eq!(
        s.flush(),
        Err(Vec::new()),
        "a step in flight reads the tree's pages"
    );
    assert!(
        apply(&mut s, &second).is_empty(),
        "the extra row is dropped"
    );
    let pools = s.pool_table();
    assert_eq!(
        (pools[0].quarantined, pools[0].locked, pools[0].evictable),
        (0, 0, 2)
    );
    s.submit(vec![spec(2, prompt(1, 8), 2)]);
    assert_eq!(run_step(&mut s).0.released_slots, [1]);
}

#[test]
fn stop_tokens_wait_for_the_minimum_and_end_of_sequence_can_be_ignored() {
    let mut s = scheduler(SchedulerConfig {
        eos_token_ids: vec![5],
        ..config()
    });
    let mut specs = vec![
        spec(1, prompt(0, 8), 9),
        spec(2, prompt(1, 8), 9),
        spec(3, prompt(2, 8), 9),
    ];
    specs[0].ignore_eos = false;
    specs[1].ignore_eos = false;
    specs[1].min_new_tokens = 2;
    s.submit(specs);
    let (_, outputs) = run_step(&mut s);
    assert_eq!(
        outputs.finish_codes,
        [FinishCode::StopToken, FinishCode::None, FinishCode::None]
    );
    assert_eq!(outputs.token_ids, [5, 5, 5], "the stop token is emitted");
    let (_, outputs) = run_step(&mut s);
    assert_eq!(
        outputs.finish_codes,
        [FinishCode::StopToken, FinishCode::None]
    );
}

#[test]
fn nan_and_foreign_ids_end_only_their_request_and_leave_nothing_in_the_tree() {
    let mut s = scheduler(config());
    s.submit(vec![
        spec(1, prompt(0, 8), 9),
        spec(2, prompt(1, 8), 9),
        spec(3, prompt(2, 8), 9),
    ]);
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    let foreign = i32::try_from(VOCAB).unwrap();
    let status = [STATUS_NAN, STATUS_OK, STATUS_OK];
    let outputs = s.apply(plan.step_id, &[5, foreign, 5], &status, 0).unwrap();
    assert_eq!(
        outputs.finish_codes,
        [FinishCode::ErrorNan, FinishCode::ErrorNan, FinishCode::None]
    );
    assert_eq!(outputs.token_ids, [5]);
    s.check_invariants().unwrap();
    assert_eq!(
        s.pool_table()[0].locked,
        2,
        "only the third prompt is in the tree"
    );
    assert_eq!(s.pool_table()[0].evictable, 0);
}

#[test]
fn no_output_is_an_immediate_end() {
    let mut s = scheduler(config());
    assert!(s.submit(vec![spec(1, prompt(0, 8), 0)]).is_empty());
    assert_eq!(s.take_outputs().finish_codes, [FinishCode::Length]);
    assert!(!s.has_work());
    assert!(s.next_plan(0).unwrap().is_none());
}

#[test]
fn a_hit_brings_replay_rows_floors_and_the_tail_of_the_folded_chunk() {
    let mut harness = Harness::new(&config());
    harness.submit(spec(1, prompt(0, 22), 4));
    harness.drain(2);
    harness.submit(spec(2, prompt(0, 22), 4));
    harness.launch();
    let plan = harness.plans.last().unwrap();
    assert_eq!(plan.cached_len, [20]);
    assert_eq!(
        (&plan.replay_len[..], &plan.start_position[..]),
        (&[8][..], &[12][..])
    );
    assert_eq!(
        (&plan.window_floor[..], &plan.write_floor[..]),
        (&[12][..], &[20][..])
    );
    assert_eq!(
        (&plan.tail_len[..], &plan.tail_floor[..]),
        (&[8][..], &[14][..])
    );
    assert_eq!(plan.totals.prefill_tokens, 2);
    harness.drain(1);
    assert_eq!(harness.requests[&2].cached_len, 20);
    harness.check_end();
}

#[test]
fn namespaces_share_nothing() {
    let mut harness = Harness::new(&config());
    let salted = |id, salt: Option<&str>| RequestSpec {
        namespace: Namespace {
            cache_salt: salt.map(str::to_owned),
            ..Namespace::default()
        },
        ..spec(id, prompt(0, 30), 2)
    };
    for (id, salt) in [(1, None), (2, Some("")), (3, Some("a")), (4, Some("a"))] {
        harness.submit(salted(id, salt));
        harness.drain(1);
    }
    let hits: Vec<u32> = (1..=4).map(|id| harness.requests[&id].cached_len).collect();
    assert_eq!(hits, [0, 0, 0, 28]);
}

#[test]
fn without_encoder_replay_or_with_the_cache_off_nothing_hits() {
    for (encoder_replay, radix_cache) in [(false, true), (true, false)] {
        let mut harness = Harness::new(&SchedulerConfig {
            encoder_replay,
            radix_cache,
            ..config()
        });
        for id in 1..=2 {
            harness.submit(spec(id, prompt(0, 40), 3));
            harness.drain(2);
        }
        assert_eq!(harness.requests[&2].cached_len, 0);
        assert_eq!(harness.scheduler.pool_table()[0].evictable, 0);
        harness.check_end();
    }
}

#[test]
fn equal_prompts_that_arrive_together_share_the_first_ones_pages() {
    for depth in 1..=2 {
        let mut harness = Harness::new(&config());
        for id in 1..=3 {
            harness.submit(spec(id, prompt(0, 20), 12));
        }
        harness.drain(depth);
        let hits: Vec<u32> = (1..=3).map(|id| harness.requests[&id].cached_len).collect();
        assert_eq!(hits, [0, 16, 16], "depth {depth}");
        assert!(harness.scheduler.stats().counters.held_back >= 2);
        harness.check_end();
    }
}

#[test]
fn asking_in_vain_does_not_use_up_the_steps_a_request_waits_for_its_prefix() {
    let mut s = scheduler(config());
    s.submit(vec![spec(1, prompt(0, 20), 1), spec(2, prompt(0, 20), 1)]);
    let plan = s.next_plan(0).unwrap().unwrap().clone();
    for _ in 0..5 {
        assert!(s.next_plan(0).unwrap().is_none());
    }
    assert_eq!(
        s.stats().counters.held_back,
        2,
        "once with the first, once behind it"
    );
    apply(&mut s, &plan);
    assert_eq!(run_step(&mut s).0.cached_len, [16]);
}

#[test]
fn different_prompts_are_not_held_back() {
    let mut s = scheduler(config());
    s.submit(vec![spec(1, prompt(0, 12), 3), spec(2, prompt(1, 12), 3)]);
    assert_eq!(run_step(&mut s).0.admitted, [1, 2]);
    assert_eq!(s.stats().counters.held_back, 0);
}

#[test]
fn the_carried_prompt_goes_first_and_alone_may_be_cut() {
    let mut s = scheduler(config());
    s.submit(vec![
        spec(1, prompt(0, 60), 3),
        spec(2, prompt(1, 60), 3),
        spec(3, prompt(2, 9), 3),
    ]);
    let plans: Vec<StepPlan> = (0..6).map(|_| run_step(&mut s).0).collect();
    assert_eq!(plans[0].request_id, [1]);
    assert_eq!(plans[1].request_id, [1]);
    assert_eq!(
        (&plans[2].request_id[..], plans[2].samples[0]),
        (&[1, 2][..], 1)
    );
    assert_eq!(plans[2].cu_seqlens, [0, 12, 24]);
    assert_eq!(plans[3].request_id, [2]);
    assert_eq!(plans[4].request_id, [2], "its last chunk fills the step");
    assert_eq!(plans[5].request_id, [3]);
}

#[test]
fn decode_rows_ride_along_in_mixed_steps_only() {
    for mixed_chunk in [false, true] {
        let mut s = scheduler(SchedulerConfig {
            mixed_chunk,
            ..config()
        });
        s.submit(vec![spec(1, prompt(0, 8), 9)]);
        run_step(&mut s);
        s.submit(vec![spec(2, prompt(1, 60), 9)]);
        let (plan, _) = run_step(&mut s);
        assert_eq!(plan.phase, Phase::Prefill);
        let expected: &[u64] = if mixed_chunk { &[2, 1] } else { &[2] };
        assert_eq!(plan.request_id, expected);
        assert!(plan.positions.len() <= 24);
    }
}

#[test]
fn decode_steps_follow_a_prefill_step_as_asked() {
    let mut s = scheduler(SchedulerConfig {
        prefill_decode_interval: 2,
        ..config()
    });
    s.submit(vec![spec(1, prompt(0, 8), 20)]);
    run_step(&mut s);
    s.submit(vec![spec(2, prompt(1, 60), 20)]);
    let phases: Vec<Phase> = (0..6).map(|_| run_step(&mut s).0.phase).collect();
    let (d, p) = (Phase::Decode, Phase::Prefill);
    assert_eq!(phases, [d, d, p, d, d, p]);
}

#[test]
fn lpm_takes_the_longest_hit_first_and_fcfs_the_first() {
    for (policy, expected) in [(Policy::Fcfs, [2, 3]), (Policy::Lpm, [3, 2])] {
        let mut s = scheduler(SchedulerConfig {
            policy,
            max_running_requests: 1,
            ..config()
        });
        s.submit(vec![spec(1, prompt(0, 30), 1)]);
        while s.has_work() {
            run_step(&mut s);
        }
        s.submit(vec![spec(2, prompt(1, 20), 1), spec(3, prompt(0, 30), 1)]);
        let mut order = Vec::new();
        while s.has_work() {
            order.extend(run_step(&mut s).0.admitted);
        }
        assert_eq!(order, expected, "{policy:?}");
    }
}

#[test]
fn a_hit_ends_where_the_request_wants_rows() {
    let mut s = scheduler(config());
    s.submit(vec![spec(1, prompt(0, 60), 1)]);
    while s.has_work() {
        run_step(&mut s);
    }
    for (max_cached_len, expected) in [(None, 56), (Some(30), 28), (Some(8), 0)] {
        let limited = RequestSpec {
            max_cached_len,
            whole_extend: true,
            ..spec(2, prompt(0, 60), 1)
        };
        s.submit(vec![limited]);
        let (plan, _) = run_step(&mut s);
        assert_eq!(plan.cached_len, [expected], "{max_cached_len:?}");
        while s.has_work() {
            run_step(&mut s);
        }
    }
}

#[test]
fn whole_extend_runs_every_row_through_the_decoder() {
    let mut s = scheduler(config());
    let whole = RequestSpec {
        whole_extend: true,
        ..spec(1, prompt(0, 40), 2)
    };
    s.submit(vec![whole]);
    let (open, _) = run_step(&mut s);
    assert_eq!((open.tail_len[0], open.samples[0]), (24, 0));
    let (last, _) = run_step(&mut s);
    assert_eq!((last.tail_len[0], last.tail_floor[0]), (16, 0));
}
