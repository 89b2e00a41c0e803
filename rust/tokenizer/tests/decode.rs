//! Streams against decoding everything at once, and against a naive search for stop strings.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use dsserve_tokenizer::{
    Stop, StopSet, StreamOptions, TextStream, TokenAligner, TokenTable, Tokenizer,
};
use proptest::prelude::*;
use std::sync::{Arc, LazyLock};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| common::load(&common::Spec::default(), 1));
static REFERENCE: LazyLock<tokenizers::Tokenizer> = LazyLock::new(|| {
    let path = common::write(&common::Spec::default()).join("tokenizer.json");
    tokenizers::Tokenizer::from_file(path).unwrap()
});

const TEXTS: [&str; 8] = [
    "the thing ",
    "你好，世界",
    "👩‍👩‍👧‍👦!",
    "e\u{301}🇩🇪",
    "\r\n\t ",
    "<think>",
    "｜DSML｜",
    "ab",
];

fn options(stop: &[String], skip_special: bool, include_stop: bool) -> StreamOptions {
    StreamOptions {
        stop: StopSet::new(stop.to_vec()).unwrap().map(Arc::new),
        skip_special,
        include_stop,
        ..StreamOptions::default()
    }
}

fn stream(options: StreamOptions) -> TextStream {
    TextStream::new(Arc::clone(TOKENIZER.table()), options)
}

/// Ids of good text, of any vocabulary entry (broken characters) and from outside the vocabulary.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    let size = u32::try_from(TOKENIZER.table().len()).unwrap();
    let piece = prop_oneof![
        3 => prop::sample::select(&TEXTS[..])
            .prop_map(|text| TOKENIZER.encode(text, false).unwrap()),
        3 => (0..size).prop_map(|id| vec![id]),
        // Bytes of multi-byte characters: most sequences are broken.
        3 => (130..size).prop_map(|id| vec![id]),
        1 => (size..=u32::MAX).prop_map(|id| vec![id]),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

/// Ids with the ends of the calls they are split into.
fn split_ids() -> impl Strategy<Value = (Vec<u32>, Vec<usize>)> {
    ids().prop_flat_map(|ids| {
        let len = ids.len();
        let ends = prop::collection::vec(0..=len, 0..6).prop_map(move |mut ends| {
            ends.push(len);
            ends.sort_unstable();
            ends
        });
        (Just(ids), ends)
    })
}

fn stops() -> impl Strategy<Value = Vec<String>> {
    let stop = prop_oneof![
        "[abth ]{1,4}",
        "[你好\u{fffd}]{1,2}",
        Just("the thing".to_owned()),
        Just("hi".to_owned()),
        Just("👩‍👩".to_owned()),
        Just("<think>".to_owned()),
    ];
    prop::collection::vec(stop, 1..5)
}

/// One character of the decoded bytes.
struct Char {
    raw_start: usize,
    text_end: usize,
    is_incomplete: bool,
}

/// Decodes by looking at the whole of the bytes: the text that is certain and where each of its
/// characters comes from.
fn decided(bytes: &[u8]) -> (String, Vec<Char>) {
    let mut text = String::new();
    let mut chars = Vec::new();
    let mut raw = 0;
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            text.push(c);
            raw += c.len_utf8();
            chars.push(Char {
                raw_start: raw - c.len_utf8(),
                text_end: text.len(),
                is_incomplete: false,
            });
        }
        let broken = chunk.invalid();
        if broken.is_empty() {
            continue;
        }
        let raw_start = raw;
        raw += broken.len();
        let is_incomplete = raw == bytes.len()
            && std::str::from_utf8(broken).is_err_and(|error| error.error_len().is_none());
        if !is_incomplete {
            text.push(char::REPLACEMENT_CHARACTER);
        }
        chars.push(Char {
            raw_start,
            text_end: text.len(),
            is_incomplete,
        });
    }
    (text, chars)
}

fn shown_bytes(table: &TokenTable, id: u32, skip_special: bool) -> &[u8] {
    if skip_special && table.is_special(id) {
        &[]
    } else {
        table.bytes(id)
    }
}

fn bytes_of(ids: &[u32], skip_special: bool) -> Vec<u8> {
    ids.iter()
        .flat_map(|&id| shown_bytes(TOKENIZER.table(), id, skip_special))
        .copied()
        .collect()
}

/// How many leading ids have all their text within the first `emitted` bytes.
fn emitted_ids(ids: &[u32], skip_special: bool, emitted: usize) -> usize {
    let (_, chars) = decided(&bytes_of(ids, skip_special));
    let mut raw_end = 0;
    ids.iter()
        .take_while(|&&id| {
            raw_end += shown_bytes(TOKENIZER.table(), id, skip_special).len();
            chars
                .iter()
                .take_while(|c| c.raw_start < raw_end)
                .all(|c| !c.is_incomplete && c.text_end <= emitted)
        })
        .count()
}

/// (pattern, start, end) of the match that is complete first; the longest of those.
fn first_match(text: &str, stops: &[String]) -> Option<(usize, usize, usize)> {
    (1..=text.len()).find_map(|end| {
        let head = &text.as_bytes()[..end];
        (0..stops.len())
            .filter(|&index| head.ends_with(stops[index].as_bytes()))
            .max_by_key(|&index| (stops[index].len(), usize::MAX - index))
            .map(|index| (index, end - stops[index].len(), end))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn streamed_text_is_whole_text_under_any_split(
        (ids, ends) in split_ids(), skip_special: bool,
    ) {
        let known: Vec<u32> = ids.iter().copied()
            .filter(|&id| REFERENCE.id_to_token(id).is_some()).collect();
        let whole = REFERENCE.decode(&known, skip_special).unwrap();
        prop_assert_eq!(&TOKENIZER.decode(&ids, skip_special), &whole);
        let mut stream = stream(options(&[], skip_special, false));
        let mut text = String::new();
        let mut start = 0;
        for end in ends {
            let piece = stream.push(&ids[start..end]);
            start = end;
            text.push_str(&piece.text);
            let (certain, _) = decided(&bytes_of(&ids[..end], skip_special));
            prop_assert_eq!(&text, &certain);
            prop_assert_eq!(piece.kept_tokens as usize, end);
            prop_assert_eq!(
                piece.emitted_tokens as usize,
                emitted_ids(&ids[..end], skip_special, text.len())
            );
        }
        let tail = stream.finish();
        let is_replacement = tail.text == "\u{fffd}";
        prop_assert!(tail.text.is_empty() || is_replacement);
        prop_assert_eq!(tail.emitted_tokens as usize, ids.len());
        text.push_str(&tail.text);
        prop_assert_eq!(text, whole);
        prop_assert_eq!(stream.finish().text, "");
    }

    #[test]
    fn ranges_of_ids_cover_the_text(
        (ids, ends) in split_ids(), skip_special: bool,
    ) {
        let whole = TOKENIZER.decode(&ids, skip_special);
        let mut aligner = TokenAligner::new(Arc::clone(TOKENIZER.table()), skip_special);
        let mut tokens = Vec::new();
        let mut start = 0;
        for end in ends {
            tokens.extend(aligner.push(&ids[start..end]));
            start = end;
        }
        let tail = aligner.finish();
        prop_assert_eq!(tail.end, whole.len() as u64);
        let mut last_end = 0;
        for (index, token) in tokens.iter().enumerate() {
            prop_assert_eq!(token.id, ids[index]);
            prop_assert_eq!(token.text.start, last_end);
            last_end = token.text.end;
            // What is certain after this id ends where its range does.
            let (certain, _) = decided(&bytes_of(&ids[..=index], skip_special));
            prop_assert_eq!(token.text.end, certain.len() as u64);
            let before = usize::try_from(token.text.start).unwrap();
            prop_assert_eq!(token.first_char, whole[..before].chars().count() as u64);
        }
        prop_assert_eq!(tail.start, last_end);
    }

    #[test]
    fn text_stops_at_the_first_complete_stop_string(
        (ids, ends) in split_ids(), stops in stops(), include_stop: bool, skip_special: bool,
    ) {
        let mut stream = stream(options(&stops, skip_special, include_stop));
        let longest = stops.iter().map(String::len).max().unwrap();
        let mut text = String::new();
        let mut start = 0;
        let mut last = stream.push(&[]);
        for end in ends {
            last = stream.push(&ids[start..end]);
            start = end;
            text.push_str(&last.text);
            let (certain, _) = decided(&bytes_of(&ids[..end], skip_special));
            if first_match(&certain, &stops).is_none() {
                prop_assert_eq!(last.stop, None);
                prop_assert!(certain.starts_with(&text));
                let held = &certain[text.len()..];
                prop_assert!(held.len() < longest);
                // Held only as long as it may still become a stop string, and all of that is held.
                let can_begin = |tail: &str| stops.iter().any(|stop| stop.starts_with(tail));
                prop_assert!(held.is_empty() || can_begin(held));
                let released = certain.char_indices().map(|(at, _)| at)
                    .take_while(|&at| at < text.len());
                for at in released {
                    prop_assert!(!can_begin(&certain[at..]));
                }
                prop_assert_eq!(
                    last.emitted_tokens as usize,
                    emitted_ids(&ids[..end], skip_special, text.len())
                );
            }
        }
        let tail = stream.finish();
        text.push_str(&tail.text);
        let whole = TOKENIZER.decode(&ids, skip_special);
        match first_match(&whole, &stops) {
            None => {
                prop_assert_eq!(tail.stop, None);
                prop_assert_eq!(text, whole);
                prop_assert_eq!(tail.emitted_tokens as usize, ids.len());
            }
            Some((pattern, at, end)) => {
                prop_assert_eq!(tail.stop, Some(Stop::String(pattern)));
                prop_assert_eq!(stream.stop_text(), Some(stops[pattern].as_str()));
                prop_assert_eq!(&text, &whole[..if include_stop { end } else { at }]);
                // The fewest ids whose certain text holds the match; all if the end brought it.
                let kept = (0..=ids.len())
                    .find(|&n| decided(&bytes_of(&ids[..n], skip_special)).0.len() >= end)
                    .unwrap_or(ids.len());
                prop_assert_eq!(tail.kept_tokens as usize, kept);
                if last.stop.is_some() {
                    prop_assert_eq!(last.kept_tokens as usize, kept);
                    prop_assert_eq!(tail.text, "");
                }
            }
        }
    }
}

#[test]
fn emoji_with_joiners_comes_out_only_in_whole_characters() {
    let text = "👩‍👩‍👧 ok";
    let mut stream = stream(StreamOptions::default());
    let mut out = String::new();
    for id in TOKENIZER.encode(text, false).unwrap() {
        let piece = stream.push(&[id]);
        assert!(!piece.text.contains(char::REPLACEMENT_CHARACTER));
        out.push_str(&piece.text);
    }
    assert_eq!(out, text);
    assert_eq!(stream.finish().text, "");
}

#[test]
fn special_tokens_are_kept_or_skipped_as_asked() {
    let ids = TOKENIZER.encode("a<｜User｜>b<think>", false).unwrap();
    assert_eq!(ids.len(), 4);
    let text_of = |skip| stream(options(&[], skip, false)).push(&ids).text;
    assert_eq!(text_of(false), "a<｜User｜>b<think>");
    assert_eq!(text_of(true), "ab<think>");
}

#[test]
fn bad_stop_strings_are_refused() {
    let empty = StopSet::new(vec!["a".to_owned(), String::new()]);
    assert_eq!(empty.unwrap_err().to_string(), "stop string 1 is empty");
    let long = StopSet::new(vec!["x".repeat(40_000), "y".repeat(40_000)]);
    assert!(long.unwrap_err().to_string().contains("80000 bytes"));
    assert!(StopSet::new(Vec::new()).unwrap().is_none());
}

#[test]
fn ids_after_the_end_are_ignored() {
    let mut stream = stream(StreamOptions::default());
    let ids = TOKENIZER.encode("ab", false).unwrap();
    stream.push(&ids);
    assert_eq!(stream.finish().kept_tokens, 2);
    assert_eq!(stream.push(&ids).text, "");
    assert_eq!(stream.push_stop_token(&ids).kept_tokens, 2);
}
