//! Which bytes does an id stand for?

use crate::error::TokenizerError;
use std::path::Path;
use std::sync::LazyLock;
use tokenizers::DecoderWrapper;

/// Ids from here on are taken for a damaged file rather than a vocabulary.
const MAX_TOKENS: usize = 1 << 24;

/// The bytes of every id of a byte-level vocabulary, and which ids are special.
///
/// Added tokens stand for their literal spelling. Ids outside the vocabulary (a model may have more
/// output rows than its tokenizer has ids) stand for nothing: they give no text and no error, so
/// that one odd id cannot end a stream or disturb others.
#[derive(Debug)]
pub struct TokenTable {
    /// `bytes[ends[id - 1]..ends[id]]` belongs to `id`.
    ends: Vec<u32>,
    bytes: Vec<u8>,
    is_special: Vec<bool>,
}

impl TokenTable {
    /// Builds the table of a tokenizer.
    ///
    /// # Errors
    /// [`TokenizerError::Parse`] if its decoder is not byte-level or its ids are out of proportion.
    pub fn build(hf: &tokenizers::Tokenizer, path: &Path) -> Result<Self, TokenizerError> {
        let bad = |reason: String| TokenizerError::Parse {
            path: path.to_path_buf(),
            reason,
        };
        if !matches!(hf.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(bad("its decoder is not ByteLevel".to_owned()));
        }
        let mut spellings: Vec<(u32, Vec<u8>, bool)> = hf
            .get_vocab(false)
            .into_iter()
            .map(|(token, id)| (id, token_bytes(&token), false))
            .collect();
        for (id, token) in hf.get_added_tokens_decoder() {
            spellings.push((id, token.content.into_bytes(), token.special));
        }
        // Stable: an added token comes after a vocabulary entry of the same id and replaces it.
        spellings.sort_by_key(|(id, ..)| *id);
        let len = spellings.last().map_or(0, |(id, ..)| *id as usize + 1);
        if len > MAX_TOKENS {
            return Err(bad(format!("it has an id of {}", len - 1)));
        }
        let mut table = Self {
            ends: Vec::with_capacity(len),
            bytes: Vec::new(),
            is_special: vec![false; len],
        };
        let mut entries = spellings.into_iter().peekable();
        while let Some((id, spelling, is_special)) = entries.next() {
            if entries.peek().is_some_and(|(next, ..)| *next == id) {
                continue;
            }
            let end = to_u32(table.bytes.len()).ok_or_else(|| bad("it is too large".to_owned()))?;
            table.ends.resize(id as usize, end);
            table.bytes.extend_from_slice(&spelling);
            let end = to_u32(table.bytes.len()).ok_or_else(|| bad("it is too large".to_owned()))?;
            table.ends.push(end);
            table.is_special[id as usize] = is_special;
        }
        Ok(table)
    }

    /// Largest id plus one; gaps below it stand for nothing.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no id at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of `id`, empty outside the vocabulary.
    #[must_use]
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Whether `id` is a special token.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.is_special.get(id as usize).copied().unwrap_or(false)
    }

    /// All special ids, ascending.
    #[must_use]
    pub fn special_ids(&self) -> Vec<u32> {
        (0u32..)
            .zip(&self.is_special)
            .filter_map(|(id, &is_special)| is_special.then_some(id))
            .collect()
    }

    /// Decodes all `ids` at once; broken UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.bytes(id));
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn to_u32(value: usize) -> Option<u32> {
    u32::try_from(value).ok()
}

/// The bytes that a vocabulary entry of a byte-level tokenizer stands for.
pub(crate) fn token_bytes(token: &str) -> Vec<u8> {
    static BYTE_OF_CHAR: LazyLock<[Option<u8>; 324]> = LazyLock::new(byte_of_char);
    byte_level_bytes(token, &BYTE_OF_CHAR)
}

/// The inverse of GPT-2's byte-to-character table, by code point (all below 324).
fn byte_of_char() -> [Option<u8>; 324] {
    let mut table = [None; 324];
    let mut next = 256;
    for byte in 0..=255u8 {
        let is_printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        if is_printable {
            table[usize::from(byte)] = Some(byte);
        } else {
            table[next] = Some(byte);
            next += 1;
        }
    }
    table
}

/// The bytes of a vocabulary entry; one that is not in the byte alphabet stands for itself.
fn byte_level_bytes(token: &str, byte_of_char: &[Option<u8>; 324]) -> Vec<u8> {
    token
        .chars()
        .map(|c| byte_of_char.get(c as usize).copied().flatten())
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| token.as_bytes().to_vec())
}
