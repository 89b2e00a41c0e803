//! Many streams in one call behave as each alone.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use dsserve_tokenizer::{
    StopSet, StreamOptions, StreamTable, TextStream, TokenBatch, Tokenizer, TokenizerError,
};
use proptest::prelude::*;
use std::sync::{Arc, LazyLock};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| common::load(&common::Spec::default(), 1));

fn table() -> StreamTable {
    StreamTable::new(Arc::clone(TOKENIZER.table()))
}

fn options() -> StreamOptions {
    StreamOptions {
        stop: StopSet::new(vec!["he".to_owned()]).unwrap().map(Arc::new),
        ..StreamOptions::default()
    }
}

proptest! {
    #[test]
    fn interleaved_streams_do_not_disturb_each_other(
        steps in prop::collection::vec(
            prop::collection::vec((0..4usize, prop::collection::vec(0..300u32, 0..4)), 0..6), 0..12,
        ),
    ) {
        let mut table = table();
        let handles: Vec<u64> = (0..4).map(|_| table.open(options()).unwrap()).collect();
        let mut alone: Vec<TextStream> = (0..4)
            .map(|_| TextStream::new(Arc::clone(TOKENIZER.table()), options()))
            .collect();
        for step in steps {
            let batch_handles: Vec<u64> = step.iter().map(|(index, _)| handles[*index]).collect();
            let ids: Vec<u32> = step.iter().flat_map(|(_, ids)| ids.clone()).collect();
            let mut offsets = vec![0u32];
            for (_, ids) in &step {
                offsets.push(offsets[offsets.len() - 1] + u32::try_from(ids.len()).unwrap());
            }
            let pieces = table
                .push(TokenBatch { handles: &batch_handles, offsets: &offsets, ids: &ids })
                .unwrap();
            let expected: Vec<_> =
                step.iter().map(|(index, ids)| alone[*index].push(ids)).collect();
            prop_assert_eq!(pieces, expected);
        }
        for (handle, stream) in handles.iter().zip(&mut alone) {
            prop_assert_eq!(table.finish(*handle).unwrap(), stream.finish());
        }
    }
}

#[test]
fn a_batch_with_an_unknown_handle_changes_no_stream() {
    let mut table = table();
    let open = table.open(options()).unwrap();
    let closed = table.open(options()).unwrap();
    assert!(table.close(closed));
    let batch = TokenBatch {
        handles: &[open, closed],
        offsets: &[0, 1, 2],
        ids: &[70, 70],
    };
    let error = table.push(batch).unwrap_err();
    assert!(matches!(error, TokenizerError::UnknownStream { handle } if handle == closed));
    assert_eq!(table.finish(open).unwrap().kept_tokens, 0);
}

#[test]
fn bad_offsets_are_refused() {
    let mut table = table();
    let handle = table.open(options()).unwrap();
    for offsets in [&[][..], &[0], &[0, 3], &[1, 2], &[0, 1, 2]] {
        let batch = TokenBatch {
            handles: &[handle],
            offsets,
            ids: &[70, 70],
        };
        let error = table.push(batch).unwrap_err();
        assert!(
            matches!(error, TokenizerError::BadOffsets { .. }),
            "{offsets:?}"
        );
    }
}

#[test]
fn a_handle_is_not_used_again() {
    let mut table = table();
    let first = table.open(options()).unwrap();
    assert!(table.close(first));
    assert!(!table.close(first));
    let second = table.open(options()).unwrap();
    assert_ne!(first, second);
    assert!(table.finish(first).is_err());
    assert_eq!(table.len(), 1);
    assert!(table.close(second));
    assert!(table.is_empty());
}
