//! A small byte-level tokenizer written to a file, in the shape of the released one.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]
#![allow(dead_code, reason = "every test file uses a part of it")]

use dsserve_tokenizer::Tokenizer;
use serde_json::{json, Map, Value};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

pub const BOS: u32 = 0;
pub const EOS: u32 = 1;
pub const GPT2: &str = "gpt2";
pub const DEEPSEEK: &str = "deepseek";

/// Spelled special tokens after the three of the vocabulary; the second is added but not special.
pub const ADDED: [(&str, bool); 4] = [
    ("<｜User｜>", true),
    ("<think>", false),
    ("</think>", true),
    ("｜DSML｜", true),
];

/// Merges over the byte alphabet; the CJK and emoji ones make tokens of broken characters.
const MERGED_TEXTS: [&[u8]; 12] = [
    b"th",
    b"the",
    b" a",
    b" th",
    b" the",
    b"in",
    b"ing",
    "你".as_bytes(),
    "好".as_bytes(),
    b"\xe4\xbd",
    b"\xf0\x9f",
    b"\xf0\x9f\x91",
];

pub struct Spec {
    pub pre_tokenizer: &'static str,
    pub add_bos: bool,
    pub decoder: Value,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            pre_tokenizer: DEEPSEEK,
            add_bos: false,
            decoder: byte_level(true),
        }
    }
}

pub fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
           "use_regex": use_regex})
}

/// Writes the files into a directory of their own and returns it.
pub fn write(spec: &Spec) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "tokenizer-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    std::fs::create_dir_all(&dir).unwrap();
    let text = serde_json::to_vec(&tokenizer_json(spec)).unwrap();
    std::fs::write(dir.join("tokenizer.json"), text).unwrap();
    let config = json!({"add_bos_token": spec.add_bos, "bos_token": "<｜begin▁of▁sentence｜>"});
    std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
    dir
}

pub fn load(spec: &Spec, num_threads: usize) -> Tokenizer {
    Tokenizer::from_path(&write(spec), num_threads).unwrap()
}

fn tokenizer_json(spec: &Spec) -> Value {
    let specials = [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
    ];
    let mut vocab = Map::new();
    for special in specials {
        vocab.insert(special.to_owned(), json!(vocab.len()));
    }
    for byte in 0..=255 {
        vocab.insert(spell(&[byte]), json!(vocab.len()));
    }
    let mut merges = Vec::new();
    for text in MERGED_TEXTS {
        // Merged byte by byte from the left, so that every beginning is a token, too.
        for end in 2..=text.len() {
            let token = spell(&text[..end]);
            if !vocab.contains_key(&token) {
                vocab.insert(token, json!(vocab.len()));
                merges.push(json!([spell(&text[..end - 1]), spell(&text[end - 1..end])]));
            }
        }
    }
    let added: Vec<Value> = specials
        .iter()
        .map(|special| (*special, true))
        .chain(ADDED)
        .enumerate()
        .map(|(index, (content, special))| {
            let id = if index < 3 {
                index
            } else {
                vocab.len() + index - 3
            };
            json!({"id": id, "content": content, "special": special, "single_word": false,
                   "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let split = |pattern: &str| {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
               "invert": false})
    };
    let pre_tokenizer = if spec.pre_tokenizer == GPT2 {
        byte_level(true)
    } else {
        json!({"type": "Sequence", "pretokenizers": [
            split(r"\p{N}"),
            split("[一-龥\u{3040}-ゟ゠-ヿ]+"),
            split(concat!(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
                "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|",
                "\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
            )),
            byte_level(false),
        ]})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": pre_tokenizer, "post_processor": byte_level(true),
        "decoder": spec.decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": merges},
    })
}

/// The spelling of bytes in GPT-2's alphabet.
fn spell(bytes: &[u8]) -> String {
    let is_printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    bytes
        .iter()
        .map(|&byte| {
            if is_printable(byte) {
                char::from(byte)
            } else {
                let rank = (0..byte).filter(|&other| !is_printable(other)).count();
                char::from_u32(256 + u32::try_from(rank).unwrap()).unwrap()
            }
        })
        .collect()
}
