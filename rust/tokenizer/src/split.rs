//! Where may a long text be cut so that its parts encode to the same ids as the whole?
//!
//! Merges never cross the pieces that the pre-tokenizer makes, so a cut is safe where every
//! pre-tokenizer step ends a piece, whatever stands around. For the patterns below that is so
//! between an ASCII letter and a space that is followed by an ASCII letter: none of their
//! alternatives runs from a letter into a space, and the next piece begins with that space. Any
//! other tokenizer is encoded in one go.

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
    let is_normalized = match &tokenizer["normalizer"] {
        Value::Null => false,
        normalizer => normalizer["normalizers"] != Value::Array(Vec::new()),
    };
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
    !is_normalized && !has_spanning_tokens && splits_at_spaces(&tokenizer["pre_tokenizer"])
}

fn splits_at_spaces(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("ByteLevel") => {
            pre_tokenizer["add_prefix_space"] == false && pre_tokenizer["use_regex"] == true
        }
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
    let bytes = text.as_bytes();
    let mut parts = Vec::new();
    let mut start = 0;
    while bytes.len() - start > part_bytes {
        let from = start + part_bytes;
        let Some(offset) = bytes[from..].windows(3).position(|window| {
            window[0].is_ascii_alphabetic() && window[1] == b' ' && window[2].is_ascii_alphabetic()
        }) else {
            break;
        };
        let end = from + offset + 1;
        parts.push(&text[start..end]);
        start = end;
    }
    parts.push(&text[start..]);
    parts
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
}
