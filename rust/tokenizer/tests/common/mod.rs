//! A small byte-level tokenizer written to a file, in the shape of the released one.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]
#![allow(dead_code, reason = "every test file uses a part of it")]

use dsserve_tokenizer::Tokenizer;
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
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

/// How many merges are learned.
const NUM_TRAINED: usize = 500;

/// What trained merges are learned from.
pub const CORPUS: &str = "the quick brown fox jumps over the lazy dog and the other dogs, then it rests. \
    There is nothing in this thing that the others think of; aaaaaaaaaaaa bbbbbbb abababab aabb abaab \
    def encode(self, text: str) -> list[int]:\n    return [self.table[c] for c in text]\n\n\n\
    \t\tif (x == 10) { y += 100; } // 1000 2000 1234567890 ====== ------ ...... !!!! ((((  )))) \
    你好，世界。今天天气很好，我们去公园。世界世界你好你好 こんにちは カタカナ 한국어 \
    👩\u{200d}👩\u{200d}👧 👨\u{200d}👩 😀😀😀 e\u{301}e\u{301} été à la mode façade naïve \
    Привет, мир! Привет мир мир שלום العربية हिन्दी ไทย '' '' it's we'll I'd they've \
    camelCaseName snake_case_name kebab-case-name foo.bar.baz() http://example.com/path?x=1&y=2 ";

pub struct Spec {
    pub pre_tokenizer: &'static str,
    /// Pattern of the first split step of [`DEEPSEEK`].
    pub digits: &'static str,
    /// Learn merges from [`CORPUS`] instead of taking [`MERGED_TEXTS`].
    pub is_trained: bool,
    pub add_bos: bool,
    pub decoder: Value,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            pre_tokenizer: DEEPSEEK,
            digits: r"\p{N}",
            is_trained: false,
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
    let pairs = if spec.is_trained {
        trained_pairs()
    } else {
        listed_pairs()
    };
    for (left, right) in pairs {
        let (left, right) = (spell(&left), spell(&right));
        let token = format!("{left}{right}");
        if !vocab.contains_key(&token) {
            vocab.insert(token, json!(vocab.len()));
            merges.push(json!([left, right]));
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
            split(spec.digits),
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

/// The texts merged byte by byte from the left, so that every beginning is a token, too.
fn listed_pairs() -> Vec<(Vec<u8>, Vec<u8>)> {
    MERGED_TEXTS
        .iter()
        .flat_map(|text| {
            (1..text.len()).map(|end| (text[..end].to_vec(), text[end..=end].to_vec()))
        })
        .collect()
}

/// Byte-pair training: the most frequent pair of the corpus, again and again.
fn trained_pairs() -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut words: Vec<Vec<Vec<u8>>> = CORPUS
        .split_inclusive(' ')
        .map(|word| word.bytes().map(|byte| vec![byte]).collect())
        .collect();
    let mut pairs = Vec::new();
    while pairs.len() < NUM_TRAINED {
        let mut counts: BTreeMap<(&[u8], &[u8]), usize> = BTreeMap::new();
        for word in &words {
            for pair in word.windows(2) {
                *counts.entry((&pair[0], &pair[1])).or_default() += 1;
            }
        }
        let Some((best, _)) = counts
            .into_iter()
            .filter(|(pair, _)| {
                !pairs.iter().any(|(left, right): &(Vec<u8>, Vec<u8>)| {
                    [left.as_slice(), right].concat() == [pair.0, pair.1].concat()
                })
            })
            .max_by_key(|&(pair, count)| (count, std::cmp::Reverse(pair)))
        else {
            break;
        };
        let best = (best.0.to_vec(), best.1.to_vec());
        for word in &mut words {
            let mut at = 0;
            while at + 1 < word.len() {
                if word[at] == best.0 && word[at + 1] == best.1 {
                    let right = word.remove(at + 1);
                    word[at].extend(right);
                }
                at += 1;
            }
        }
        pairs.push(best);
    }
    pairs
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
