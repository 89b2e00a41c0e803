//! S13: whatever the groups run, all their ranks enter the same collectives.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;

use common::{config, prompt, spec};
use dsserve_scheduler::{
    Collective, DpError, DpRecord, DpShape, DpStep, Phase, Scheduler, SchedulerConfig,
};
use proptest::prelude::*;

const SHAPE: DpShape = DpShape {
    num_layers: 6,
    num_dense_layers: 1,
    first_tail_layer: 4,
    num_draft_stages: 2,
    is_all_to_all: true,
    spreads_logits: true,
};

prop_compose! {
    fn any_record()(
        kind in prop_oneof![
            Just(Phase::Idle),
            Just(Phase::Prefill),
            Just(Phase::Decode),
            Just(Phase::Verify),
            Just(Phase::Prebuilt),
        ],
        rows in 1_u32..5_000,
        shares in (0_u32..=100, 0_u32..=100, 0_u32..=100),
        votes in any::<[bool; 5]>(),
        longest_prefix in 0_u32..2_000_000,
        step in Just(7_u64),
    ) -> DpRecord {
        if matches!(kind, Phase::Idle | Phase::Prebuilt) {
            return DpRecord { kind, ..DpRecord::idle(step) };
        }
        DpRecord {
            step,
            kind,
            rows,
            logits_rows: rows * shares.0 / 100,
            replay_rows: rows * shares.1 / 100,
            tail_rows: rows * shares.2 / 100,
            decode_graph: votes[0],
            prefill_graph: votes[1],
            draft_graph: votes[2],
            two_batches: votes[3] && rows > 1,
            split: rows / 2,
            longest_prefix,
            is_probe: votes[4],
        }
    }
}

prop_compose! {
    fn any_shape()(
        num_layers in 1_u32..12,
        dense in 0_u32..4,
        tail in 0_u32..12,
        num_draft_stages in 0_u32..4,
        is_all_to_all: bool,
        spreads_logits: bool,
    ) -> DpShape {
        DpShape {
            num_layers,
            num_dense_layers: dense.min(num_layers),
            first_tail_layer: tail.min(num_layers),
            num_draft_stages,
            is_all_to_all,
            spreads_logits,
        }
    }
}

proptest! {
    #[test]
    fn every_combination_of_records_has_a_list_and_what_is_opened_is_closed(
        records in proptest::collection::vec(any_record(), 1..9),
        shape in any_shape(),
    ) {
        let combined = DpStep::combine(&records).unwrap();
        let runs = records.iter().any(|record| record.rows > 0);
        prop_assert_eq!(combined.is_some(), runs);
        let Some(step) = combined else { return Ok(()); };
        let list = step.collectives(&shape);
        let mut open = Vec::new();
        for collective in &list {
            match *collective {
                Collective::Dispatch { layer, batch } | Collective::GatherRows { layer, batch } => {
                    open.push((layer, batch));
                }
                Collective::Combine { layer, batch } | Collective::ScatterSums { layer, batch } => {
                    prop_assert_eq!(open.remove(0), (layer, batch));
                }
                _ => {}
            }
        }
        prop_assert!(open.is_empty());
        let has_prompts = records.iter().any(|record| record.kind == Phase::Prefill);
        prop_assert_eq!(step.kind == Phase::Prefill, has_prompts);
        prop_assert!(!(step.decode_graph && has_prompts));
    }

    /// What a rank runs itself does not matter once the records are combined: the order of groups
    /// changes no list, and neither does the exchange over bytes.
    #[test]
    fn all_ranks_enter_the_same_list(
        records in proptest::collection::vec(any_record(), 2..9),
        rotation in 0_usize..8,
        shape in any_shape(),
    ) {
        let sent: Vec<DpRecord> = records
            .iter()
            .map(|record| DpRecord::from_bytes(&record.to_bytes()).unwrap())
            .collect();
        prop_assert_eq!(&sent, &records);
        let lists = |records: &[DpRecord]| {
            DpStep::combine(records).unwrap().map(|step| step.collectives(&shape))
        };
        let mut rotated = records.clone();
        rotated.rotate_left(rotation % records.len());
        prop_assert_eq!(lists(&sent), lists(&rotated));
    }

    #[test]
    fn bytes_are_a_record_or_an_error(bytes in any::<[u8; 40]>()) {
        if let Ok(record) = DpRecord::from_bytes(&bytes) {
            prop_assert_eq!(record.to_bytes(), bytes);
        }
    }

    /// Two real schedulers with different queues, step by step.
    #[test]
    fn groups_with_different_queues_agree(
        prompts in proptest::collection::vec((1_u32..60, 1_u32..9, any::<bool>()), 1..8),
        draft_len in 0_u32..3,
    ) {
        let config = SchedulerConfig { draft_len, ..config() };
        let mut groups: Vec<Scheduler> =
            (0..2).map(|_| Scheduler::new(config.clone()).unwrap()).collect();
        for (index, (len, output, group)) in prompts.iter().enumerate() {
            let request = spec(index as u64, prompt(u32::try_from(index).unwrap(), *len), *output);
            groups[usize::from(*group)].submit(vec![request]);
        }
        for step in 1..200 {
            let mut records = Vec::new();
            for group in &mut groups {
                let plan = group.next_plan(0).unwrap().cloned();
                records.push(plan.as_ref().map_or(DpRecord::idle(step), |plan| {
                    DpRecord::of_plan(step, plan)
                }));
                if let Some(plan) = plan {
                    let counts: Vec<u32> =
                        plan.samples.iter().map(|samples| u32::from(*samples > 0)).collect();
                    let ids = vec![5; counts.iter().sum::<u32>() as usize];
                    let status = vec![0; counts.len()];
                    group.apply_runs(plan.step_id, &ids, &counts, &status, 0).unwrap();
                }
            }
            let Some(combined) = DpStep::combine(&records).unwrap() else {
                prop_assert!(groups.iter().all(|group| !group.has_work()));
                return Ok(());
            };
            let list = combined.collectives(&SHAPE);
            // A group that runs needs its experts; one that is idle enters the same list.
            let needs_tail = records.iter().any(|record| record.tail_rows > 0);
            let num_layers = if needs_tail { 5 } else { 3 };
            let dispatched = |c: &&Collective| matches!(c, Collective::Dispatch { .. });
            prop_assert_eq!(list.iter().filter(dispatched).count(), num_layers);
        }
        prop_assert!(false, "the requests never ended");
    }
}

#[test]
fn records_that_do_not_fit_are_named() {
    let idle = DpRecord::idle(3);
    assert_eq!(DpStep::combine(&[]), Err(DpError::Empty));
    let late = DpRecord::idle(2);
    let error = DpStep::combine(&[idle, late]).unwrap_err();
    assert_eq!(error.to_string(), "group 1 is at step 2, group 0 at step 3");
    let wrong = DpRecord {
        kind: Phase::Decode,
        ..idle
    };
    let error = DpStep::combine(&[idle, wrong]).unwrap_err();
    assert!(matches!(error, DpError::Record { group: 1, .. }));
}

#[test]
fn one_vote_against_is_enough_and_idle_groups_have_none() {
    let votes = |decode_graph| DpRecord {
        kind: Phase::Decode,
        rows: 24,
        logits_rows: 24,
        tail_rows: 24,
        two_batches: true,
        split: 12,
        decode_graph,
        ..DpRecord::idle(1)
    };
    let agreed = DpStep::combine(&[votes(true), votes(true)])
        .unwrap()
        .unwrap();
    assert!(agreed.decode_graph && agreed.two_batches);
    assert_eq!(agreed.padded_rows(&[8, 16, 32]), Some(32));
    let against = DpStep::combine(&[votes(true), votes(false)])
        .unwrap()
        .unwrap();
    assert!(!against.decode_graph);
    assert_eq!(against.padded_rows(&[8, 16, 32]), None);
    let beside_idle = DpStep::combine(&[votes(true), DpRecord::idle(1)])
        .unwrap()
        .unwrap();
    assert!(beside_idle.decode_graph, "an idle group pads");
    assert!(!beside_idle.two_batches, "it has no rows to cut in two");
}

#[test]
fn open_chunks_everywhere_skip_the_decoder_half_for_all() {
    let open = DpRecord {
        kind: Phase::Prefill,
        rows: 64,
        two_batches: false,
        ..DpRecord::idle(1)
    };
    let list = |records: &[DpRecord]| {
        let step = DpStep::combine(records).unwrap().unwrap();
        step.collectives(&SHAPE)
    };
    assert_eq!(list(&[open, DpRecord::idle(1)]).len(), 3 * 2);
    let closing = DpRecord {
        tail_rows: 8,
        logits_rows: 1,
        ..open
    };
    assert_eq!(list(&[open, closing]).len(), 5 * 2 + 1 + 2 * 2);
}
