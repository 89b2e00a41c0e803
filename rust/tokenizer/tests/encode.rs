//! Loading, parallel encoding against serial, and rendered prompts.
#![allow(clippy::single_range_in_vec_init, reason = "one range is meant")]
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::{Spec, BOS, DEEPSEEK, GPT2};
use dsserve_tokenizer::{
    Backend, Tokenizer, TokenizerError, TokenizerOptions, PARALLEL_TEXT_BYTES,
};
use proptest::prelude::*;
use serde_json::json;
use std::sync::LazyLock;

struct Pair {
    parallel: Tokenizer,
    serial: Tokenizer,
}

fn pair(pre_tokenizer: &'static str) -> Pair {
    let dir = common::write(&Spec {
        pre_tokenizer,
        ..Spec::default()
    });
    Pair {
        parallel: Tokenizer::from_path(&dir, 3).unwrap(),
        serial: Tokenizer::from_path(&dir, 1).unwrap(),
    }
}

static PAIRS: LazyLock<[Pair; 2]> = LazyLock::new(|| [pair(GPT2), pair(DEEPSEEK)]);

/// Texts above the limit for cutting, made of pieces that are awkward to cut at.
fn long_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-zA-Z]{1,6} ",
        "[a-z]{1,3}[ \n\t]{1,3}",
        "[0-9.,'\"!? -]{1,4}",
        "[你好世界ひら]{1,3}",
        prop::sample::select(vec![
            "<think>",
            "｜DSML｜",
            "<｜User｜> a",
            "it's a",
            "👩‍👧 x",
            "e\u{301} e",
            "\u{a0}b c",
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 40..200).prop_map(|pieces| {
        let unit = pieces.concat();
        unit.repeat(PARALLEL_TEXT_BYTES / unit.len() + 2)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn long_texts_encode_in_parallel_as_in_one_go(text in long_text()) {
        for pair in PAIRS.iter() {
            prop_assert_eq!(
                pair.parallel.encode(&text, true).unwrap(),
                pair.serial.encode(&text, true).unwrap()
            );
        }
    }

    #[test]
    fn a_batch_encodes_as_its_texts_one_by_one(
        texts in prop::collection::vec("[a-c <>你👩\n]{0,400}", 0..40),
    ) {
        let tokenizer = &PAIRS[1];
        let batch = tokenizer.parallel.encode_batch(&texts, true).unwrap();
        let each: Vec<_> =
            texts.iter().map(|text| tokenizer.serial.encode(text, true).unwrap()).collect();
        prop_assert_eq!(batch, each);
    }

    #[test]
    fn encoded_text_decodes_to_itself(text in "\\PC{0,60}[ \n]{0,3}\\PC{0,10}") {
        for pair in PAIRS.iter() {
            let ids = pair.serial.encode(&text, false).unwrap();
            prop_assert_eq!(pair.serial.decode(&ids, false), text.clone());
        }
    }
}

#[test]
fn bos_is_added_where_the_configuration_says_so() {
    let tokenizer = common::load(
        &Spec {
            add_bos: true,
            ..Spec::default()
        },
        1,
    );
    let without = tokenizer.encode("a", false).unwrap();
    let with = tokenizer.encode("a", true).unwrap();
    assert_eq!(with, [&[BOS], &without[..]].concat());
    assert_eq!(tokenizer.encode("", true).unwrap(), [BOS]);
    assert!(tokenizer.encode("", false).unwrap().is_empty());
}

#[test]
fn only_ranges_of_a_rendered_prompt_become_special_tokens() {
    let tokenizer = &PAIRS[1].serial;
    let prompt = "<think><think>";
    let think = tokenizer.token_to_id("<think>").unwrap();
    let ids = tokenizer.encode_rendered(prompt, &[0..7]).unwrap();
    assert_eq!(ids[0], think);
    assert!(ids.len() > 2 && !ids[1..].contains(&think));
    assert_eq!(tokenizer.decode(&ids, false), prompt);
    assert_eq!(tokenizer.encode(prompt, false).unwrap(), [think, think]);
}

#[test]
fn a_range_without_a_token_is_plain_text_with_its_surroundings() {
    let tokenizer = &PAIRS[1].serial;
    let whole = tokenizer.encode_rendered("in the ring", &[]).unwrap();
    let ranged = tokenizer.encode_rendered("in the ring", &[3..5]).unwrap();
    assert_eq!(ranged, whole);
}

#[test]
fn the_file_is_not_needed_after_loading() {
    let dir = common::write(&Spec::default());
    let options = TokenizerOptions::default().with_backend(Backend::HuggingFace);
    let tokenizer = Tokenizer::load(&dir, &options).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let ids = tokenizer.encode_rendered("it's <think> 你", &[]).unwrap();
    assert_eq!(tokenizer.decode(&ids, false), "it's <think> 你");
    assert!(!ids.contains(&tokenizer.token_to_id("<think>").unwrap()));
}

#[test]
fn ranges_outside_the_prompt_are_refused() {
    let tokenizer = &PAIRS[1].serial;
    for ranges in [vec![0..2], vec![0..9], vec![3..4, 0..3]] {
        let error = tokenizer.encode_rendered("你a", &ranges).unwrap_err();
        assert!(
            matches!(error, TokenizerError::SpecialRange { .. }),
            "{ranges:?}"
        );
    }
}

#[test]
fn unusable_files_are_named_in_the_error() {
    let dir = common::write(&Spec::default());
    let missing = Tokenizer::from_path(&dir.join("other.json"), 1).unwrap_err();
    assert!(missing.to_string().contains("other.json"));
    std::fs::write(dir.join("tokenizer.json"), "{\"model\": ").unwrap();
    let broken = Tokenizer::from_path(&dir, 1).unwrap_err();
    assert!(matches!(broken, TokenizerError::Parse { .. }));
    let other = common::write(&Spec {
        decoder: json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        ..Spec::default()
    });
    let unsupported = Tokenizer::from_path(&other, 1).unwrap_err();
    assert!(unsupported.to_string().contains("ByteLevel"));
}
