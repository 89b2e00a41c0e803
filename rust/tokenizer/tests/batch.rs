//! Many streams in one call behave as each alone.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use dsserve_tokenizer::{
    Piece, Pieces, StopSet, StreamEnd, StreamOptions, StreamTable, TextStream, TokenBatch,
    Tokenizer, TokenizerError,
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

/// What a batch does to each stream, done to each alone.
fn push_alone(stream: &mut TextStream, ids: &[u32], end: StreamEnd) -> Piece {
    let piece = match end {
        StreamEnd::StopToken => stream.push_stop_token(ids),
        _ => stream.push(ids),
    };
    if end == StreamEnd::Open {
        return piece;
    }
    let mut tail = stream.finish();
    tail.text.insert_str(0, &piece.text);
    tail
}

fn end() -> impl Strategy<Value = StreamEnd> {
    prop_oneof![
        12 => Just(StreamEnd::Open),
        1 => Just(StreamEnd::Ended),
        1 => Just(StreamEnd::StopToken),
    ]
}

/// Per step: the stream, its ids, and what becomes of it. Stream 4 does not exist.
fn steps(max: usize) -> impl Strategy<Value = Vec<Vec<(u64, Vec<u32>, StreamEnd)>>> {
    let update = (0..5u64, prop::collection::vec(0..300u32, 0..4), end());
    prop::collection::vec(prop::collection::vec(update, 0..6), 0..max)
}

fn check(steps: Vec<Vec<(u64, Vec<u32>, StreamEnd)>>) -> Result<(), TestCaseError> {
    let mut table = table();
    let mut alone: Vec<TextStream> = Vec::new();
    for name in 0..4 {
        table.open(name, options()).unwrap();
        alone.push(TextStream::new(Arc::clone(TOKENIZER.table()), options()));
    }
    let mut pieces = Pieces::default();
    for (number, step) in steps.into_iter().enumerate() {
        let names: Vec<u64> = step.iter().map(|(name, ..)| *name).collect();
        let ids: Vec<u32> = step.iter().flat_map(|(_, ids, _)| ids.clone()).collect();
        let ends: Vec<StreamEnd> = step.iter().map(|(.., end)| *end).collect();
        let mut offsets = vec![0u32];
        for (_, ids, _) in &step {
            offsets.push(offsets[offsets.len() - 1] + u32::try_from(ids.len()).unwrap());
        }
        let batch = TokenBatch {
            names: &names,
            offsets: &offsets,
            ids: &ids,
            ends: &ends,
        };
        // Both ways to push, in turns, on the same streams.
        let given: Vec<Option<Piece>> = if number % 2 == 0 {
            table.push(batch).unwrap()
        } else {
            table.push_into(batch, &mut pieces).unwrap();
            prop_assert_eq!(pieces.len(), names.len());
            prop_assert_eq!(pieces.is_empty(), names.is_empty());
            pieces.iter().map(|piece| piece.map(Piece::from)).collect()
        };
        let expected: Vec<_> = step
            .iter()
            .map(|(name, ids, end)| {
                let stream = alone.get_mut(usize::try_from(*name).unwrap())?;
                Some(push_alone(stream, ids, *end))
            })
            .collect();
        prop_assert_eq!(given, expected);
    }
    for (name, stream) in (0..).zip(&mut alone) {
        prop_assert_eq!(table.finish(name).unwrap(), stream.finish());
        prop_assert_eq!(table.stop_text(name), stream.stop_text());
    }
    Ok(())
}

proptest! {
    #[test]
    fn interleaved_streams_do_not_disturb_each_other(steps in steps(12)) {
        check(steps)?;
    }
}

/// Not in a normal run: about 10^6 updates of streams.
#[test]
#[ignore = "minutes"]
fn a_million_updates_are_as_each_stream_alone() {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(16_000));
    runner.run(&steps(50), check).unwrap();
}

#[test]
fn the_token_that_stopped_a_generation_counts_and_has_no_text() {
    let mut table = table();
    for (name, include_stop) in [(1, false), (2, true)] {
        let options = StreamOptions {
            include_stop,
            ..StreamOptions::default()
        };
        table.open(name, options).unwrap();
    }
    let batch = TokenBatch {
        names: &[1, 2],
        offsets: &[0, 2, 4],
        ids: &[70, 71, 70, 71],
        ends: &[StreamEnd::StopToken; 2],
    };
    let pieces: Vec<Piece> = table
        .push(batch)
        .unwrap()
        .into_iter()
        .map(Option::unwrap)
        .collect();
    assert_eq!(pieces[0].text, TOKENIZER.decode(&[70], true));
    assert_eq!(pieces[1].text, TOKENIZER.decode(&[70, 71], true));
    for piece in pieces {
        assert_eq!((piece.kept_tokens, piece.emitted_tokens), (2, 2));
    }
}

#[test]
fn bad_offsets_and_ends_are_refused_and_no_stream_is_changed() {
    let mut table = table();
    table.open(1, options()).unwrap();
    let refused = |table: &mut StreamTable, offsets: &[u32], ends: &[StreamEnd]| {
        let batch = TokenBatch {
            names: &[1],
            offsets,
            ids: &[70, 70],
            ends,
        };
        let error = table.push(batch).unwrap_err();
        assert!(
            matches!(error, TokenizerError::BadOffsets { .. }),
            "{offsets:?}"
        );
    };
    for offsets in [&[][..], &[0], &[0, 3], &[1, 2], &[0, 1, 2]] {
        refused(&mut table, offsets, &[]);
    }
    refused(&mut table, &[0, 2], &[StreamEnd::Open; 2]);
    assert_eq!(table.finish(1).unwrap().kept_tokens, 0);
}

#[test]
fn a_name_is_free_again_once_its_stream_is_closed() {
    let mut table = table();
    table.open(7, options()).unwrap();
    let error = table.open(7, options()).unwrap_err();
    assert!(matches!(error, TokenizerError::StreamInUse { name: 7 }));
    assert!(table.close(7));
    assert!(!table.close(7));
    assert!(table.finish(7).is_err());
    table.open(7, options()).unwrap();
    assert_eq!(table.len(), 1);
    assert!(table.close(7));
    assert!(table.is_empty());
}
