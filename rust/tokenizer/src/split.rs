//! Which split pattern does a tokenizer have, and where may a long text be cut so that its parts
//! encode to the same ids as the whole?
//!
//! Merges never cross the pieces that the pre-tokenizer makes, so a cut is safe where every
//! pre-tokenizer step ends a piece, whatever stands around. For the patterns below that is so
//! between an ASCII letter and a space that is followed by an ASCII letter: none of their
//! alternatives runs from a letter into a space, and the next piece begins with that space. Any
//! other tokenizer is encoded in one go.

use crate::fast::{Class, Classes, Pattern};
use serde_json::Value;

/// Split patterns of the released tokenizers (and of small ones shaped like them) that keep the
/// property above.
const SAFE_PATTERNS: [&str; 4] = [
    r"\p{N}{1,3}",
    r"\p{N}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
        "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
];

/// Whether `tokenizer` (the parsed `tokenizer.json`) can be cut at the places [`cut`] looks for.
pub(crate) fn is_cuttable(tokenizer: &Value) -> bool {
    // A token with a blank inside, or one that takes blanks around it along, could span the cut.
    let can_span = |token: &Value| {
        ["lstrip", "rstrip", "single_word"]
            .iter()
            .any(|flag| token[flag] != Value::Bool(false))
            || token["content"]
                .as_str()
                .is_none_or(|text| text.contains(' '))
    };
    let has_spanning_tokens = tokenizer["added_tokens"]
        .as_array()
        .is_some_and(|tokens| tokens.iter().any(can_span));
    !is_normalized(tokenizer)
        && !has_spanning_tokens
        && splits_at_spaces(&tokenizer["pre_tokenizer"])
}

/// Whether text is changed before it is split.
pub(crate) fn is_normalized(tokenizer: &Value) -> bool {
    match &tokenizer["normalizer"] {
        Value::Null => false,
        normalizer => normalizer["normalizers"] != Value::Array(Vec::new()),
    }
}

/// The split pattern of a tokenizer, if it is one that [`crate::fast`] has code for.
///
/// # Errors
/// What the tokenizer has instead.
pub(crate) fn pattern(tokenizer: &Value) -> Result<Pattern, String> {
    let pre_tokenizer = &tokenizer["pre_tokenizer"];
    let unknown = || "its split pattern is unknown".to_owned();
    if is_bytes(pre_tokenizer, true) {
        return Ok(Pattern::Gpt2);
    }
    let is_sequence = pre_tokenizer["type"] == "Sequence";
    match pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice) {
        Some([digits, cjk, words, bytes])
            if is_sequence
                && [digits, cjk, words].into_iter().all(is_safe_split)
                && is_bytes(bytes, false)
                && pattern_of(cjk) == SAFE_PATTERNS[2]
                && pattern_of(words) == SAFE_PATTERNS[3] =>
        {
            let digits = pattern_of(digits);
            let position = SAFE_PATTERNS[..2].iter().position(|safe| *safe == digits);
            let max_digits = [3, 1][position.ok_or_else(unknown)?];
            Ok(Pattern::DeepSeek { max_digits })
        }
        _ => Err(unknown()),
    }
}

fn is_bytes(step: &Value, use_regex: bool) -> bool {
    step["type"] == "ByteLevel"
        && step["add_prefix_space"] == false
        && step["use_regex"] == use_regex
}

fn splits_at_spaces(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("ByteLevel") => is_bytes(pre_tokenizer, true),
        Some("Sequence") => {
            let Some(steps) = pre_tokenizer["pretokenizers"].as_array() else {
                return false;
            };
            let Some((last, splits)) = steps.split_last() else {
                return false;
            };
            let ends_in_bytes = last["type"] == "ByteLevel" && last["add_prefix_space"] == false;
            let cuts_words = last["use_regex"] == true
                || splits
                    .iter()
                    .any(|step| pattern_of(step) == SAFE_PATTERNS[3]);
            ends_in_bytes && cuts_words && splits.iter().all(is_safe_split)
        }
        _ => false,
    }
}

fn is_safe_split(step: &Value) -> bool {
    step["type"] == "Split"
        && step["behavior"] == "Isolated"
        && step["invert"] == false
        && SAFE_PATTERNS.contains(&pattern_of(step).as_str())
}

/// The regular expression of a split step, with escapes that need not be there resolved.
fn pattern_of(step: &Value) -> String {
    let pattern = step["pattern"]["Regex"].as_str().unwrap_or_default();
    pattern
        .replace(r"\r", "\r")
        .replace(r"\n", "\n")
        .replace("\\\"", "\"")
}

/// Cuts `text` into parts of about `part_bytes` at safe places; a part is longer where there is none.
pub(crate) fn cut(text: &str, part_bytes: usize) -> Vec<&str> {
    cut_where(text, part_bytes, |from| {
        space_between_letters(&text.as_bytes()[from..]).map(|offset| from + offset)
    })
}

/// As [`cut`], for text without added tokens that is split by a known pattern.
///
/// The released pattern isolates runs of digits and of CJK before it looks for words, so a part may
/// also end where one begins or ends.
pub(crate) fn cut_known(text: &str, pattern: Pattern, part_bytes: usize) -> Vec<&str> {
    cut_where(text, part_bytes, |from| match pattern {
        Pattern::DeepSeek { .. } => isolated_run(text, from),
        Pattern::Gpt2 => {
            space_between_letters(&text.as_bytes()[from..]).map(|offset| from + offset)
        }
    })
}

/// Cuts at the first place that `find` tells at or after every multiple of `part_bytes`.
fn cut_where(text: &str, part_bytes: usize, find: impl Fn(usize) -> Option<usize>) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut start = 0;
    while text.len() - start > part_bytes {
        let Some(end) = find(start + part_bytes) else {
            break;
        };
        parts.push(&text[start..end]);
        start = end;
    }
    parts.push(&text[start..]);
    parts
}

/// Offset of a space between two ASCII letters.
fn space_between_letters(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(3)
        .position(|window| {
            window[0].is_ascii_alphabetic() && window[1] == b' ' && window[2].is_ascii_alphabetic()
        })
        .map(|offset| offset + 1)
}

/// The first place at or after `from` where words cannot go on: a space between letters, or where
/// a run of digits or of CJK begins or ends.
fn isolated_run(text: &str, from: usize) -> Option<usize> {
    let classes = Classes::get();
    let group = |c: char| {
        let kind = classes.of(c);
        (kind.is_cjk, kind.class == Class::Number)
    };
    let from = (from..text.len()).find(|&at| text.is_char_boundary(at))?;
    let mut before = None;
    for (offset, c) in text[from..].char_indices() {
        let at = from + offset;
        let is_between = before.is_some_and(|before| group(before) != group(c));
        let rest = &text.as_bytes()[at..];
        let is_letter = |c: Option<&u8>| c.is_some_and(u8::is_ascii_alphabetic);
        let is_space = c == ' '
            && before.is_some_and(|before: char| before.is_ascii_alphabetic())
            && is_letter(rest.get(1));
        if is_between || is_space {
            return Some(at);
        }
        before = Some(c);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn byte_level(use_regex: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": use_regex})
    }

    fn split(pattern: &str) -> Value {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
               "invert": false})
    }

    fn tokenizer(pre_tokenizer: &Value) -> Value {
        json!({"normalizer": null, "added_tokens": [], "pre_tokenizer": pre_tokenizer})
    }

    fn sequence(patterns: &[&str]) -> Value {
        let mut steps: Vec<Value> = patterns.iter().map(|pattern| split(pattern)).collect();
        steps.push(byte_level(false));
        json!({"type": "Sequence", "pretokenizers": steps})
    }

    #[test]
    fn known_tokenizers_are_cuttable_and_others_are_not() {
        assert!(is_cuttable(&tokenizer(&byte_level(true))));
        assert!(is_cuttable(&tokenizer(&sequence(&SAFE_PATTERNS))));
        let escaped = SAFE_PATTERNS[3].replace('\r', r"\r").replace('\n', r"\n");
        assert!(is_cuttable(&tokenizer(&sequence(&[&escaped]))));
        assert!(!is_cuttable(&tokenizer(&byte_level(false))));
        assert!(!is_cuttable(&tokenizer(&sequence(&SAFE_PATTERNS[..3]))));
        assert!(!is_cuttable(&tokenizer(&sequence(&[
            SAFE_PATTERNS[3],
            "[a-z ]+"
        ]))));
        let mut normalized = tokenizer(&byte_level(true));
        normalized["normalizer"] = json!({"type": "Lowercase"});
        assert!(!is_cuttable(&normalized));
        let mut spanning = tokenizer(&byte_level(true));
        spanning["added_tokens"] = json!([{"content": "a b", "single_word": false,
            "lstrip": false, "rstrip": false}]);
        assert!(!is_cuttable(&spanning));
    }

    #[test]
    fn parts_are_the_text_cut_between_letter_and_space() {
        let text = "ab 12 你好 cd ef gh ij";
        let parts = cut(text, 4);
        assert_eq!(parts, ["ab 12 你好 cd", " ef gh", " ij"]);
        assert_eq!(cut("abcdefgh 1", 4), ["abcdefgh 1"]);
        assert_eq!(cut("", 4), [""]);
    }

    #[test]
    fn known_patterns_are_told_apart_and_others_are_unknown() {
        let released = |digits| sequence(&[digits, SAFE_PATTERNS[2], SAFE_PATTERNS[3]]);
        let pattern_of = |steps: &Value| pattern(&tokenizer(steps));
        for (digits, max_digits) in [(SAFE_PATTERNS[0], 3), (SAFE_PATTERNS[1], 1)] {
            assert_eq!(
                pattern_of(&released(digits)),
                Ok(Pattern::DeepSeek { max_digits })
            );
        }
        assert_eq!(pattern_of(&byte_level(true)), Ok(Pattern::Gpt2));
        for other in [
            byte_level(false),
            sequence(&SAFE_PATTERNS),
            sequence(&SAFE_PATTERNS[..3]),
            released(r"\p{N}{1,2}"),
            sequence(&[SAFE_PATTERNS[2], SAFE_PATTERNS[0], SAFE_PATTERNS[3]]),
        ] {
            assert!(pattern_of(&other).is_err(), "{other}");
        }
    }

    #[test]
    fn known_text_is_cut_where_digits_or_cjk_begin_or_end() {
        let pattern = Pattern::DeepSeek { max_digits: 3 };
        let parts = |text| cut_known(text, pattern, 4);
        assert_eq!(parts("abcdef1234567"), ["abcdef", "1234567"]);
        assert_eq!(parts("你好世界，好a"), ["你好世界", "，好a"]);
        assert_eq!(parts("abcde fgh"), ["abcde", " fgh"]);
        assert_eq!(parts("a.b.c.d.e.f"), ["a.b.c.d.e.f"]);
        assert_eq!(cut_known("abcdef1", Pattern::Gpt2, 4), ["abcdef1"]);
    }
}
