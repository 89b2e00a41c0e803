//! Stop patterns over streams against searching every prefix of the whole text.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use dsserve_tokenizer::{
    Stop, StopRegex, StopSet, StreamOptions, TextStream, Tokenizer, MAX_HELD_REGEX_BYTES,
    MAX_STOP_REGEX_BYTES,
};
use proptest::prelude::*;
use regex::Regex;
use std::sync::{Arc, LazyLock};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| common::load(&common::Spec::default(), 1));

fn stream(patterns: &[&str], strings: &[&str], include_stop: bool) -> TextStream {
    let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    let options = StreamOptions {
        stop: StopSet::new(owned(strings)).unwrap().map(Arc::new),
        stop_regex: StopRegex::new(owned(patterns)).unwrap().map(Arc::new),
        skip_special: true,
        include_stop,
    };
    TextStream::new(Arc::clone(TOKENIZER.table()), options)
}

const PATTERNS: [&str; 10] = [
    "ab+a",
    "[0-9]{2,3}",
    "(?m)^b",
    "^a",
    "你.",
    "b|ab|aab",
    "a.*b",
    "\\s\\s",
    "(?i)BA",
    "[^ab]{3}",
];

/// (pattern, start, end) of the match that is complete first; of those the longest.
fn first_match(text: &str, patterns: &[&str]) -> Option<(usize, usize, usize)> {
    let anchored: Vec<Regex> = patterns
        .iter()
        .map(|pattern| Regex::new(&format!("(?:{pattern})\\z")).unwrap())
        .collect();
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
    ends.flat_map(|end| {
        text[..end]
            .char_indices()
            .map(move |(start, _)| (start, end))
    })
    .find_map(|(start, end)| {
        // The whole text before is there for `^` to look at.
        let found = anchored.iter().position(|regex| {
            regex
                .find_at(&text[..end], start)
                .is_some_and(|found| found.start() == start)
        })?;
        Some((found, start, end))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn text_stops_where_the_first_match_is_complete(
        text in "[ab01 \\n你好A]{0,24}",
        patterns in prop::sample::subsequence(&PATTERNS[..], 1..4),
        cuts in prop::collection::vec(0..24usize, 0..6),
        include_stop: bool,
    ) {
        let mut stream = stream(&patterns, &[], include_stop);
        let ids = TOKENIZER.encode(&text, false).unwrap();
        let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut.min(ids.len())).collect();
        ends.push(ids.len());
        ends.sort_unstable();
        let mut out = String::new();
        let mut start = 0;
        for end in ends {
            let piece = stream.push(&ids[start..end]);
            start = end;
            out.push_str(&piece.text);
            // Nothing is held that no match may begin with: `^a` alone holds nothing after a char.
            if piece.stop.is_none() && patterns == ["^a"] {
                prop_assert_eq!(&out, &TOKENIZER.decode(&ids[..end], true));
            }
        }
        let tail = stream.finish();
        out.push_str(&tail.text);
        match first_match(&text, &patterns) {
            None => {
                prop_assert_eq!(tail.stop, None);
                prop_assert_eq!(out, text);
            }
            Some((pattern, start, end)) => {
                prop_assert_eq!(tail.stop, Some(Stop::Regex(pattern)));
                prop_assert_eq!(stream.stop_text(), Some(patterns[pattern]));
                prop_assert_eq!(out, &text[..if include_stop { end } else { start }]);
            }
        }
    }

    #[test]
    fn a_stop_string_as_a_pattern_stops_in_the_same_place(
        text in "[ab你]{0,30}", stop in "[ab你]{1,3}", include_stop: bool,
    ) {
        let ids = TOKENIZER.encode(&text, false).unwrap();
        let run = |mut stream: TextStream| {
            let mut out: Vec<_> = ids.iter().map(|id| stream.push(&[*id])).collect();
            out.push(stream.finish());
            let facts = out.last().map(|piece| (piece.kept_tokens, piece.stop.is_some()));
            (out.iter().map(|piece| piece.text.as_str()).collect::<String>(), facts)
        };
        prop_assert_eq!(
            run(stream(&[&stop], &[], include_stop)),
            run(stream(&[], &[&stop], include_stop))
        );
    }
}

fn push_text(stream: &mut TextStream, text: &str) -> String {
    stream.push(&TOKENIZER.encode(text, false).unwrap()).text
}

#[test]
fn what_is_complete_first_stops_and_of_equal_ends_what_began_first() {
    let mut both = stream(&["b.c"], &["cd"], false);
    assert_eq!(push_text(&mut both, "a bxcd"), "a ");
    assert_eq!(both.stop_text(), Some("b.c"));
    let mut same_end = stream(&["bc"], &["abc"], false);
    assert_eq!(push_text(&mut same_end, "xabc"), "x");
    assert_eq!(same_end.stop_text(), Some("abc"));
}

#[test]
fn text_is_held_only_where_a_match_began_and_never_more_than_the_limit() {
    let mut stream = stream(&["<[^>]*>"], &[], false);
    assert_eq!(push_text(&mut stream, "a < b"), "a ");
    let mut given = 2;
    for _ in 0..3_000 {
        given += push_text(&mut stream, "你好").len();
    }
    assert_eq!(
        given,
        5 + 3_000 * 6 - (MAX_HELD_REGEX_BYTES - MAX_HELD_REGEX_BYTES % 3)
    );
    // The match began in text that is out: it is cut where that ends.
    assert_eq!(push_text(&mut stream, ">"), "");
    assert_eq!(stream.stop_text(), Some("<[^>]*>"));
}

#[test]
fn patterns_that_cannot_be_used_are_refused_with_the_reason() {
    let long = "a".repeat(MAX_STOP_REGEX_BYTES + 1);
    for (pattern, reason) in [
        (long.as_str(), "1025 bytes"),
        ("a(?=b)", "look-around"),
        ("(a)\\1", "backreferences"),
        ("(", "unclosed"),
        ("a$", "what follows"),
        ("\\bword", "what follows"),
        ("a*", "empty text"),
        ("(?:\\w{1,60}){1,60}", "written out"),
        ("(?:a?b?c?d?e?f?g?h?i?l?o?r?s?t?w? ?){150}Q", "written out"),
        ("\\pL{400}", "automaton"),
        (&"(?i)[\\p{L}--\\p{Lu}]".repeat(45), "classes"),
        (&"(?i)[[[^a]b]c]".repeat(45), "classes"),
        (&"(?i)[\u{80}-\u{10ffff}]".repeat(9), "classes"),
        (&"(?i:[\\S\\s])".repeat(8), "classes"),
        (&"\\d{1}".repeat(65), "classes"),
    ] {
        let error = StopRegex::new(vec!["x".to_owned(), pattern.to_owned()]).unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("stop pattern 1: "), "{message}");
        assert!(message.contains(reason), "{pattern}: {error}");
    }
    assert!(StopRegex::new(Vec::new()).unwrap().is_none());
    let longest = "a".repeat(MAX_STOP_REGEX_BYTES);
    assert!(StopRegex::new(vec![longest]).unwrap().is_some());
}

#[test]
fn ordinary_patterns_with_long_repetitions_are_taken() {
    for pattern in [
        "\\w{1,30}:",
        "(?s).{1,600}Q",
        "(?i)[^\\s\\d]{3,60}!",
        "[一-龥]{1,40}。",
    ] {
        let built = StopRegex::new(vec![pattern.to_owned()]);
        assert!(built.is_ok_and(|regex| regex.is_some()), "{pattern}");
    }
}

#[test]
fn limits_are_those_of_all_patterns_and_the_one_beyond_them_is_told() {
    let repeat = |pattern: &str, count| vec![pattern.to_owned(); count];
    for patterns in [
        repeat("[ab]{400}", 4),
        repeat("\\pL{10}", 16),
        repeat(&"\\d".repeat(30), 4),
        repeat(&format!("a{{1}}#{}", "[a]".repeat(300)), 6),
    ] {
        let built = |count: usize| StopRegex::new(patterns[..count].to_vec());
        let index = (1..=patterns.len())
            .find(|&count| built(count).is_err())
            .unwrap()
            - 1;
        assert!(index > 0, "{}", patterns[0]);
        let message = built(patterns.len()).unwrap_err().to_string();
        let expected = format!("stop pattern {index}: it is too large, with those before it");
        assert!(message.starts_with(&expected), "{index}: {message}");
    }
}

#[test]
fn streams_with_different_patterns_do_not_disturb_each_other() {
    let mut streams = [
        stream(&["a[0-9]{3}b"], &[], false),
        stream(&["(?s)x.{1,500}Q"], &[], false),
        stream(&["1b"], &[], false),
    ];
    let mut texts = [const { String::new() }; 3];
    for part in ["x a1", "1", "1", "b Q"] {
        for (stream, text) in streams.iter_mut().zip(&mut texts) {
            text.push_str(&push_text(stream, part));
        }
    }
    assert_eq!(texts, ["x ", "", "x a11"]);
}
