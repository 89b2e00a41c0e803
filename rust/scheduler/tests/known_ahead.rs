//! S16: what of a plan is known before the step ahead of it has a result is the same after it.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::steps::scheduler;
use common::{config, prompt, spec};
use dsserve_scheduler::{FinishCode, Policy, RequestSpec, Scheduler, SchedulerConfig, StepPlan};
use proptest::prelude::*;

/// One turn of the loop: requests that arrive, then a step.
type Turn = Vec<(u32, u32, u32)>;

/// Results bring an id that ends nobody.
fn apply(s: &mut Scheduler, plan: &StepPlan) -> Vec<FinishCode> {
    common::steps::apply(s, plan).finish_codes
}

/// A scheduler after `turns`, and the plan of the last of them, which is not applied.
fn after(config: &SchedulerConfig, turns: &[Turn]) -> Option<(Scheduler, StepPlan)> {
    let mut s = scheduler(config.clone());
    let mut next_id = 0;
    let mut last = None;
    for turn in turns {
        if let Some(plan) = last.take() {
            apply(&mut s, &plan);
        }
        for (family, prompt_len, max_new_tokens) in turn {
            next_id += 1;
            s.submit(vec![RequestSpec {
                tenant: u64::from(*family),
                ..spec(next_id, prompt(*family, *prompt_len), *max_new_tokens)
            }]);
        }
        last = s.next_plan(0).unwrap().cloned();
    }
    last.map(|plan| (s, plan))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Without the tree nothing but an end changes what the next step may use, and the steps here
    /// end nobody. (With drafts the committed length is not known ahead: `drafts.rs`.)
    #[test]
    fn a_plan_is_the_same_before_and_after_the_result_of_the_step_ahead(
        policy in prop_oneof![
            Just(Policy::Fcfs),
            Just(Policy::Hrrn),
            Just(Policy::ShortestPrefillFirst),
            Just(Policy::Lof),
            Just(Policy::Random),
        ],
        mixed_chunk: bool,
        prefill_decode_interval in 0_u32..3,
        num_pages in 30_u32..80,
        turns in proptest::collection::vec(
            proptest::collection::vec((0_u32..4, 1_u32..60, 1_u32..40), 0..3),
            1..20,
        ),
    ) {
        let config = SchedulerConfig {
            policy,
            mixed_chunk,
            prefill_decode_interval,
            num_pages,
            radix_cache: false,
            encoder_replay: true,
            ..config()
        };
        let Some((mut ahead, plan)) = after(&config, &turns) else {
            return Ok(());
        };
        let (mut behind, same) = after(&config, &turns).expect("the same turns");
        prop_assert_eq!(&plan, &same);
        let before = ahead.next_plan(0).unwrap().cloned();
        let codes = apply(&mut behind, &plan);
        let after = behind.next_plan(0).unwrap().cloned();
        if codes.iter().any(|code| *code != FinishCode::None) {
            return Ok(());
        }
        let (Some(before), Some(mut after)) = (before.clone(), after.clone()) else {
            prop_assert_eq!(before, after);
            return Ok(());
        };
        for (id, known) in after.token_ids.iter_mut().zip(&before.token_ids) {
            if *known == -1 {
                *id = -1;
            }
        }
        prop_assert_eq!(before, after);
    }
}
