//! The fast encoder gives the ids of the reference, for every text.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::{Spec, ADDED, CORPUS, DEEPSEEK, GPT2};
use dsserve_tokenizer::{Backend, Tokenizer, TokenizerError, TokenizerOptions};
use proptest::prelude::*;
use serde_json::{json, Value};
use std::path::Path;
use std::sync::LazyLock;

struct Pair {
    fast: Tokenizer,
    threaded: Tokenizer,
    reference: Tokenizer,
}

fn load(dir: &Path, backend: Backend, num_threads: usize, cache_bytes: usize) -> Tokenizer {
    let options = TokenizerOptions::default()
        .with_backend(backend)
        .with_threads(num_threads)
        .with_cache_bytes(cache_bytes);
    Tokenizer::load(dir, &options).unwrap()
}

fn pair(pre_tokenizer: &'static str, digits: &'static str, is_trained: bool) -> Pair {
    let dir = common::write(&Spec {
        pre_tokenizer,
        digits,
        is_trained,
        ..Spec::default()
    });
    Pair {
        fast: load(&dir, Backend::Fast, 1, 0),
        threaded: load(&dir, Backend::Fast, 3, 16 * 1024),
        reference: load(&dir, Backend::HuggingFace, 1, 0),
    }
}

static PAIRS: LazyLock<[Pair; 4]> = LazyLock::new(|| {
    [
        pair(DEEPSEEK, r"\p{N}{1,3}", true),
        pair(DEEPSEEK, r"\p{N}", true),
        pair(GPT2, "", true),
        pair(DEEPSEEK, r"\p{N}", false),
    ]
});

/// Characters of every class, those of the pattern's special cases often.
fn awkward() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[a-zA-Z]{1,12}",
        3 => "[ \t\n\r\u{a0}\u{2028}\u{85}]{1,4}",
        2 => "[0-9²Ⅷ٣]{1,7}",
        3 => "[!-/:-@\\[-`{-~£€。，、]{1,4}",
        2 => "[一-龥]{1,9}",
        1 => "[\u{3040}-\u{30ff}\u{9fa6}]{1,5}",
        1 => "[\u{300}-\u{310}\u{200b}-\u{200f}\u{0}-\u{8}\u{fe0f}]{1,3}",
        1 => "[😀-😏👩👨👧\u{1f1e6}-\u{1f1ff}\u{1f3fb}]{1,3}",
        1 => "\\PC{1,8}",
        1 => any::<char>().prop_map(String::from),
        2 => prop::sample::select(vec!["'s", "'ll", "a", "ab", "aab", "abab", "bbb", "\n\n\n", "  "])
            .prop_map(str::to_owned),
        1 => prop::sample::select(ADDED.map(|(text, _)| text).to_vec()).prop_map(str::to_owned),
        1 => Just("<｜User".to_owned()),
        1 => (0..CORPUS.len(), 0..60usize).prop_map(|(start, len)| {
            CORPUS.chars().skip(start / 2).take(len).collect()
        }),
        1 => ("[ab]{1,3}", 1..40usize).prop_map(|(unit, times)| unit.repeat(times)),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

fn check(text: &str) -> Result<(), TestCaseError> {
    for pair in PAIRS.iter() {
        let expected = pair.reference.encode(text, true).unwrap();
        prop_assert_eq!(&pair.fast.encode(text, true).unwrap(), &expected);
        let plain = pair.reference.encode_rendered(text, &[]).unwrap();
        prop_assert_eq!(&pair.fast.encode_rendered(text, &[]).unwrap(), &plain);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn ids_are_those_of_the_reference(text in awkward()) {
        check(&text)?;
    }

    #[test]
    fn ids_of_any_characters_are_those_of_the_reference(text in "(?s).{0,40}") {
        check(&text)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn long_texts_in_parallel_and_from_the_cache_are_as_in_one_go(
        texts in prop::collection::vec(awkward(), 1..12),
        order in prop::collection::vec(0..12usize, 1..40),
    ) {
        // 70 KB and more, with repeated messages.
        let message = |index: usize| texts[index % texts.len()].repeat(40);
        let text: String = order.iter().map(|&index| message(index) + "<think>").collect();
        let text = text.repeat(1 + 70_000 / (text.len() + 1));
        for pair in PAIRS.iter() {
            let expected = pair.fast.encode(&text, true).unwrap();
            for _ in 0..2 {
                prop_assert_eq!(&pair.threaded.encode(&text, true).unwrap(), &expected);
            }
            prop_assert!(pair.threaded.cache_stats().bytes <= 16 * 1024);
        }
    }

    /// At the lengths where the way to the ids changes, and more than are looked up together.
    #[test]
    fn many_new_words_some_of_them_twice_have_the_ids_of_the_reference(
        words in prop::collection::vec(
            prop_oneof!["[a-e]{1,20}", "[a-e]{62,67}", "[一-乐]{1,40}", "[а-д]{1,40}", "[!-#]{1,14}"],
            1..300,
        ),
        order in prop::collection::vec(any::<prop::sample::Index>(), 100..600),
    ) {
        let words: Vec<&str> = order.iter().map(|index| index.get(&words).as_str()).collect();
        check(&words.join(" "))?;
    }

    #[test]
    fn rendered_conversations_from_the_cache_are_as_by_the_reference(
        messages in prop::collection::vec(awkward(), 1..5),
        num_turns in 1..4usize,
    ) {
        // What users typed may spell special tokens; only the marks between are some.
        let mark = "<｜User｜>";
        for turn in 1..=num_turns {
            let mut prompt = String::new();
            let mut special = Vec::new();
            for message in messages.iter().cycle().take(turn * messages.len()) {
                special.push(prompt.len()..prompt.len() + mark.len());
                prompt.push_str(mark);
                prompt.push_str(&message.repeat(1 + 200 / (message.len() + 1)));
            }
            for pair in PAIRS.iter() {
                let expected = pair.reference.encode_rendered(&prompt, &special).unwrap();
                for _ in 0..2 {
                    let ids = pair.threaded.encode_rendered(&prompt, &special).unwrap();
                    prop_assert_eq!(&ids, &expected);
                }
            }
        }
        prop_assert!(PAIRS[0].threaded.cache_stats().hits > 0);
    }
}

/// Not in a normal run: 10^6 texts in all.
#[test]
#[ignore = "minutes"]
fn a_million_texts_have_the_ids_of_the_reference() {
    let config = ProptestConfig::with_cases(125_000);
    let mut runner = proptest::test_runner::TestRunner::new(config);
    // Each case checks two encodings with four tokenizers.
    runner.run(&awkward(), |text| check(&text)).unwrap();
}

/// A byte 0 once led back to the beginning of the table of tokens.
#[test]
fn every_byte_may_follow_every_other() {
    let chars: Vec<char> = (0..128u8)
        .map(char::from)
        .chain(['é', '你', '👩'])
        .collect();
    let pairs = chars
        .iter()
        .flat_map(|first| chars.iter().map(move |second| [first, second]));
    let texts: Vec<String> = pairs
        .map(|[first, second]| format!("{first}{second},a"))
        .collect();
    for pair in PAIRS.iter() {
        let expected = pair.reference.encode_batch(&texts, true).unwrap();
        for (text, expected) in texts.iter().zip(expected) {
            assert_eq!(pair.fast.encode(text, true).unwrap(), expected, "{text:?}");
        }
    }
}

#[test]
fn messages_of_an_earlier_turn_come_from_the_cache() {
    let dir = common::write(&Spec::default());
    let tokenizer = load(&dir, Backend::Auto, 1, 1 << 20);
    let reference = load(&dir, Backend::HuggingFace, 1, 0);
    let mut prompt = String::new();
    for turn in 0..5 {
        prompt.push_str("<｜User｜>");
        prompt.push_str(&format!("message {turn} ").repeat(40));
        let ids = tokenizer.encode(&prompt, false).unwrap();
        assert_eq!(ids, reference.encode(&prompt, false).unwrap());
    }
    let stats = tokenizer.cache_stats();
    assert_eq!((stats.entries, stats.misses), (5, 5));
    assert_eq!(stats.hits, 1 + 2 + 3 + 4);
}

#[test]
fn a_rendered_prompt_is_encoded_as_by_the_reference() {
    let pair = &PAIRS[0];
    let prompt = "<｜User｜>say <think> and ｜DSML｜ to <｜User｜>me<think>";
    let end = prompt.len();
    let special = [0..12, end - 7..end];
    assert_eq!(&prompt[special[0].clone()], "<｜User｜>");
    let ids = pair.fast.encode_rendered(prompt, &special).unwrap();
    assert_eq!(
        ids,
        pair.reference.encode_rendered(prompt, &special).unwrap()
    );
    let user = pair.fast.added_token_to_id("<｜User｜>").unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == user).count(), 1);
}

/// Words without a break: the reference is too slow for long ones, so they are compared in parts.
#[test]
fn long_words_take_time_in_proportion() {
    let pair = &PAIRS[0];
    for unit in [
        "a",
        "ab",
        "aab",
        "你好",
        "=",
        "qzx",
        "\u{301}",
        "👩\u{200d}",
    ] {
        let long = |len: usize| unit.repeat(len / unit.len());
        let short = long(3_000);
        assert_eq!(
            pair.fast.encode(&short, false).unwrap(),
            pair.reference.encode(&short, false).unwrap(),
            "{unit:?}"
        );
        let ids = pair.fast.encode(&long(1 << 20), false).unwrap();
        assert_eq!(pair.fast.decode(&ids, false), long(1 << 20), "{unit:?}");
    }
}

fn refused(change: impl FnOnce(&mut Value)) -> String {
    let dir = common::write(&Spec::default());
    let path = dir.join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&path, json.to_string()).unwrap();
    let options = TokenizerOptions::default().with_backend(Backend::Fast);
    let error = Tokenizer::load(&dir, &options).unwrap_err();
    assert!(matches!(error, TokenizerError::NotFast { .. }), "{error}");
    let auto = Tokenizer::load(&dir, &TokenizerOptions::default()).unwrap();
    assert_eq!(auto.backend(), Backend::HuggingFace);
    assert!(error.to_string().contains(auto.fallback_reason().unwrap()));
    assert!(auto.encode("the thing", false).unwrap().len() > 1);
    error.to_string()
}

#[test]
fn files_of_another_kind_fall_back_to_the_reference_and_say_why() {
    let pattern = refused(|json| json["pre_tokenizer"] = json!({"type": "Whitespace"}));
    assert!(pattern.contains("split pattern"), "{pattern}");
    let normalized = refused(|json| json["normalizer"] = json!({"type": "NFC"}));
    assert!(normalized.contains("normalizes"), "{normalized}");
    let dropout = refused(|json| json["model"]["dropout"] = json!(0.5));
    assert!(dropout.contains("dropout"), "{dropout}");
    let spaces = refused(|json| json["added_tokens"][4]["lstrip"] = json!(true));
    assert!(spaces.contains("lstrip"), "{spaces}");
    let twice = refused(|json| {
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        let first = merges[0].clone();
        merges.push(first);
    });
    assert!(twice.contains("second time"), "{twice}");
    let shared = refused(|json| {
        let vocabulary = json["model"]["vocab"].as_object_mut().unwrap();
        let id = vocabulary["a"].clone();
        vocabulary.insert("b".to_owned(), id);
    });
    assert!(shared.contains("one id"), "{shared}");
    let early = refused(|json| json["model"]["merges"].as_array_mut().unwrap().reverse());
    assert!(early.contains("before it is made"), "{early}");
}
