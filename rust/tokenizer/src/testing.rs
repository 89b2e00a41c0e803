//! A small tokenizer for examples and benchmarks; not part of the interface.

use serde_json::{json, Map, Value};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes a `tokenizer.json` with the 256 bytes, a few merges and `<|user|>` below the system's directory
/// for temporary files, once for all processes, and returns its path.
///
/// # Errors
/// The directory cannot be written.
pub fn example_tokenizer() -> io::Result<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let json = example_json().to_string();
    let name = concat!("dsserve-tokenizer-example-", env!("CARGO_PKG_VERSION"));
    let dir = std::env::temp_dir().join(name);
    let path = dir.join("tokenizer.json");
    if std::fs::read_to_string(&path).is_ok_and(|known| known == json) {
        return Ok(path);
    }
    std::fs::create_dir_all(&dir)?;
    // Other processes see the whole file or none.
    let own = dir.join(format!(
        "{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    std::fs::write(&own, json)?;
    std::fs::rename(&own, &path)?;
    Ok(path)
}

fn example_json() -> Value {
    let mut vocab = Map::new();
    for byte in 0..=255 {
        vocab.insert(spell(byte), json!(vocab.len()));
    }
    let space = spell(b' ');
    let mut merges = Vec::new();
    for word in ["the", "and", "ing", "er"] {
        let mut left = space.clone();
        for c in word.chars() {
            let made = format!("{left}{c}");
            if !vocab.contains_key(&made) {
                vocab.insert(made.clone(), json!(vocab.len()));
                merges.push(json!([left, c.to_string()]));
            }
            left = made;
        }
    }
    let user = json!({"id": vocab.len(), "content": "<|user|>", "special": true, "normalized": false,
                      "single_word": false, "lstrip": false, "rstrip": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [user],
        "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                          "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                    "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    })
}

/// The spelling of a byte in GPT-2's alphabet.
fn spell(byte: u8) -> String {
    let is_printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let code = if is_printable(byte) {
        u32::from(byte)
    } else {
        256 + (0..byte).fold(0, |rank, other| rank + u32::from(!is_printable(other)))
    };
    char::from_u32(code).map(String::from).unwrap_or_default()
}
