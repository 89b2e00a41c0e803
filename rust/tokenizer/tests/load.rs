//! What files say and how they can be wrong: configuration, odd vocabularies, limits.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::{Spec, BOS};
use dsserve_tokenizer::{Backend, TokenAligner, Tokenizer, TokenizerError, TokenizerOptions};
use serde_json::{json, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A tokenizer's folder, its file changed.
fn changed(change: impl FnOnce(&mut Value)) -> PathBuf {
    let dir = common::write(&Spec::default());
    let path = dir.join("tokenizer.json");
    let mut tokenizer = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut tokenizer);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    dir
}

fn configured(config: &Value) -> Result<Tokenizer, TokenizerError> {
    let dir = common::write(&Spec::default());
    std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::from_path(&dir, 1)
}

fn add_token(tokenizer: &mut Value, id: u32, content: &str) {
    let token = json!({"id": id, "content": content, "special": true, "single_word": false,
                       "lstrip": false, "rstrip": false, "normalized": false});
    tokenizer["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(token);
}

#[test]
fn the_configuration_beside_a_file_says_whether_and_which_bos_is_added() {
    let spelling = "<｜begin▁of▁sentence｜>";
    for (config, is_added) in [
        (json!({"add_bos_token": true, "bos_token": spelling}), true),
        (
            json!({"add_bos_token": true, "bos_token": {"content": spelling}}),
            true,
        ),
        (
            json!({"add_bos_token": false, "bos_token": spelling}),
            false,
        ),
        (json!({"bos_token": spelling}), false),
    ] {
        let ids = configured(&config).unwrap().encode("", true).unwrap();
        assert_eq!(ids, vec![BOS; usize::from(is_added)], "{config}");
    }
    let dir = common::write(&Spec::default());
    std::fs::remove_file(dir.join("tokenizer_config.json")).unwrap();
    let alone = Tokenizer::from_path(&dir, 1).unwrap();
    assert!(alone.encode("", true).unwrap().is_empty());
}

#[test]
fn a_bos_that_names_no_token_is_refused() {
    for bos in [json!("no such token"), json!(null), json!({"content": 7})] {
        let error = configured(&json!({"add_bos_token": true, "bos_token": bos})).unwrap_err();
        assert!(error.to_string().contains("names no token"), "{error}");
    }
    let dir = common::write(&Spec::default());
    std::fs::write(dir.join("tokenizer_config.json"), "[").unwrap();
    let error = Tokenizer::from_path(&dir, 1).unwrap_err();
    assert!(
        error.to_string().contains("tokenizer_config.json"),
        "{error}"
    );
}

#[test]
fn truncation_and_padding_of_a_file_are_ignored() {
    let dir = changed(|tokenizer| {
        tokenizer["truncation"] = json!({"direction": "Right", "max_length": 3,
                                         "strategy": "LongestFirst", "stride": 0});
        tokenizer["padding"] = json!({"strategy": {"Fixed": 50}, "direction": "Right",
                                      "pad_to_multiple_of": null, "pad_id": 2, "pad_type_id": 0,
                                      "pad_token": "<｜▁pad▁｜>"});
    });
    let plain = common::load(&Spec::default(), 1);
    for backend in [Backend::Fast, Backend::HuggingFace] {
        let options = TokenizerOptions::default().with_backend(backend);
        let tokenizer = Tokenizer::load(&dir, &options).unwrap();
        let text = "the ring and the thing";
        assert_eq!(
            tokenizer.encode(text, true).unwrap(),
            plain.encode(text, true).unwrap()
        );
    }
}

#[test]
fn ids_may_have_gaps_and_spellings_any_length() {
    let long = "<|a token of many more bytes than most|>";
    let size = common::load(&Spec::default(), 1).table().len();
    let id = u32::try_from(size).unwrap() + 40;
    let dir = changed(|tokenizer| {
        add_token(tokenizer, id, long);
        add_token(tokenizer, id + 2, "<|fourteen b|>");
        add_token(tokenizer, id + 3, "<|fifteen by.|>");
    });
    let tokenizer = Tokenizer::from_path(&dir, 1).unwrap();
    let table = tokenizer.table();
    // The reference numbers added tokens itself: they follow the vocabulary.
    let [long_id, fourteen, fifteen] = [long, "<|fourteen b|>", "<|fifteen by.|>"]
        .map(|spelling| tokenizer.added_token_to_id(spelling).unwrap());
    assert_eq!(table.bytes(long_id), long.as_bytes());
    assert_eq!(table.bytes(fourteen).len(), 14);
    assert_eq!(table.bytes(fifteen), b"<|fifteen by.|>");
    assert!(!table.is_empty());
    assert!(table.is_special(long_id) && table.special_ids().contains(&fifteen));
    let beyond = u32::try_from(table.len()).unwrap();
    assert_eq!(
        (table.bytes(beyond), table.is_special(beyond)),
        (&[][..], false)
    );
    let ids = tokenizer
        .encode(&format!("a{long}b<|fifteen by.|>"), false)
        .unwrap();
    assert!(ids.contains(&long_id));
    assert_eq!(
        tokenizer.decode(&ids, false),
        format!("a{long}b<|fifteen by.|>")
    );
    assert_eq!(tokenizer.decode(&ids, true), "ab");
    let mut aligner = TokenAligner::new(Arc::clone(table), true);
    let places = aligner.push(&[long_id, fourteen]);
    assert!(places.iter().all(|place| place.text == (0..0)));
}

#[test]
fn a_vocabulary_out_of_proportion_is_refused() {
    let dir = changed(|tokenizer| {
        tokenizer["model"]["vocab"]["far"] = json!(1 << 25);
    });
    let error = Tokenizer::from_path(&dir, 1).unwrap_err();
    assert!(matches!(error, TokenizerError::Parse { .. }), "{error}");
}

#[test]
fn the_fast_encoder_says_what_it_does_not_know_and_what_else_is_used() {
    let refused = |dir: &Path| {
        let fast = TokenizerOptions::default().with_backend(Backend::Fast);
        let error = Tokenizer::load(dir, &fast).unwrap_err();
        assert!(matches!(error, TokenizerError::NotFast { .. }), "{error}");
        let other = Tokenizer::from_path(dir, 1).unwrap();
        assert_eq!(other.backend(), Backend::HuggingFace);
        let reason = other.fallback_reason().unwrap().to_owned();
        assert!(error.to_string().contains(&reason), "{error}");
        reason
    };
    let stripped = changed(|tokenizer| tokenizer["added_tokens"][3]["lstrip"] = json!(true));
    assert!(refused(&stripped).contains("lstrip"));
    let normalized = changed(|tokenizer| tokenizer["normalizer"] = json!({"type": "NFC"}));
    assert!(refused(&normalized).contains("normalizes"));
    let merged_whole = changed(|tokenizer| tokenizer["model"]["ignore_merges"] = json!(true));
    refused(&merged_whole);
}

#[test]
fn a_tokenizer_shows_its_facts_and_not_its_tables() {
    let shown = format!("{:?}", common::load(&Spec::default(), 1));
    assert!(
        shown.contains("tokens") && shown.contains("Fast"),
        "{shown}"
    );
    assert!(shown.len() < 500);
}
