//! Streams of ids, several in one table, against decoding all of a stream's ids at once.

use crate::bytes::Bytes;
use crate::encode::tokenizer;
use dsserve_tokenizer::{
    Pieces, StopRegex, StopSet, StreamEnd, StreamOptions, StreamTable, TokenBatch,
};
use std::sync::Arc;

const STRINGS: [&str; 4] = ["th", "the", "é", "\u{fffd}"];
const PATTERNS: [&str; 3] = ["[aeiou]{2}", "(?m)^t.e", "\u{fffd}+ "];

struct Expected {
    ids: Vec<u32>,
    text: String,
    is_over: bool,
    has_stops: bool,
    skip_special: bool,
}

/// Pushes ids of any kind in batches of any shape.
pub fn run(data: &[u8]) {
    let tokenizer = tokenizer();
    let mut bytes = Bytes::new(data);
    let mut table = StreamTable::new(Arc::clone(tokenizer.table()));
    let mut pieces = Pieces::default();
    let mut expected = Vec::new();
    let include_stop = bytes.one_in(2);
    for name in 0..3u64 {
        let mask = usize::from(bytes.byte());
        let chosen = |texts: &[&str], from: usize| -> Vec<String> {
            let texts = texts.iter().enumerate();
            let texts = texts.filter(|(index, _)| mask >> (from + index) & 1 == 1);
            texts.map(|(_, text)| (*text).to_owned()).collect()
        };
        let (strings, patterns) = (chosen(&STRINGS, 0), chosen(&PATTERNS, 4));
        let skip_special = mask >> 7 == 1;
        let stream = Expected {
            ids: Vec::new(),
            text: String::new(),
            is_over: false,
            has_stops: !strings.is_empty() || !patterns.is_empty(),
            skip_special,
        };
        let options = StreamOptions {
            stop: StopSet::new(strings).expect("good strings").map(Arc::new),
            stop_regex: StopRegex::new(patterns)
                .expect("good patterns")
                .map(Arc::new),
            skip_special,
            include_stop,
        };
        table.open(name, options).expect("a new name");
        expected.push(stream);
    }
    while !bytes.is_empty() {
        let name = bytes.below(4);
        let ids: Vec<u32> = (0..bytes.below(4))
            .map(|_| u32::from(bytes.short()) % 280)
            .collect();
        let end = match bytes.byte() {
            0..=3 => StreamEnd::Ended,
            4..=7 => StreamEnd::StopToken,
            _ => StreamEnd::Open,
        };
        let batch = TokenBatch {
            names: &[name as u64],
            offsets: &[0, u32::try_from(ids.len()).expect("few")],
            ids: &ids,
            ends: &[end],
        };
        table.push_into(batch, &mut pieces).expect("offsets fit");
        let piece = pieces.iter().next().expect("one name");
        let (Some(stream), Some(piece)) = (expected.get_mut(name), piece) else {
            assert_eq!(name, 3, "a stream is gone");
            continue;
        };
        if stream.is_over {
            assert_eq!(piece.text, "", "text after the end");
            continue;
        }
        let hides_last = end == StreamEnd::StopToken && !include_stop && !ids.is_empty();
        stream.ids.extend(ids);
        stream.text.push_str(piece.text);
        assert!(piece.emitted_tokens <= piece.kept_tokens);
        assert!(piece.kept_tokens as usize <= stream.ids.len());
        let shown = &stream.ids[..stream.ids.len() - usize::from(hides_last)];
        let whole = tokenizer.decode(shown, stream.skip_special);
        if piece.stop.is_some() {
            assert!(stream.has_stops);
            assert!(whole.starts_with(&stream.text), "text before a stop");
        } else if end != StreamEnd::Open {
            assert_eq!(stream.text, whole, "all text of a stream that ended");
            assert_eq!(piece.kept_tokens as usize, stream.ids.len());
        } else {
            // An incomplete character at the end may become a good one.
            let sure = whole.trim_end_matches(char::REPLACEMENT_CHARACTER);
            let given = stream.text.trim_end_matches(char::REPLACEMENT_CHARACTER);
            assert!(sure.starts_with(given), "text that will not come");
        }
        stream.is_over = piece.stop.is_some() || end != StreamEnd::Open;
    }
}
