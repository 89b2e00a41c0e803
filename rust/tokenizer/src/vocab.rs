//! Which bytes does an id stand for?

use crate::error::TokenizerError;
use std::path::Path;
use std::sync::LazyLock;
use tokenizers::DecoderWrapper;

/// Ids from here on are taken for a damaged file rather than a vocabulary.
const MAX_TOKENS: usize = 1 << 24;

/// Longer spellings are kept apart from the entries.
const MAX_INLINE_BYTES: usize = 14;

/// The bytes of every id of a byte-level vocabulary, and which ids are special.
///
/// Added tokens stand for their literal spelling. Ids outside the vocabulary (a model may have more
/// output rows than its tokenizer has ids) stand for nothing: they give no text and no error, so
/// that one odd id cannot end a stream or disturb others.
#[derive(Debug)]
pub struct TokenTable {
    entries: Vec<Entry>,
    /// The long spellings.
    long: Vec<u8>,
}

/// One id, within one line of the processor's cache: streams look up ids from all over the vocabulary.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(16))]
struct Entry {
    /// The spelling; of a long one its start and its length in `TokenTable::long`, four bytes each.
    bytes: [u8; MAX_INLINE_BYTES],
    /// Bytes in use, or `LONG`.
    len: u8,
    is_special: bool,
}

/// The `len` of an entry whose spelling is kept apart.
const LONG: u8 = u8::MAX;

impl TokenTable {
    /// Builds the table of a tokenizer.
    ///
    /// # Errors
    /// [`TokenizerError::Parse`] if its decoder is not byte-level or its ids are out of proportion.
    pub(crate) fn build(hf: &tokenizers::Tokenizer, path: &Path) -> Result<Self, TokenizerError> {
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
            entries: vec![Entry::default(); len],
            long: Vec::new(),
        };
        let mut entries = spellings.into_iter().peekable();
        while let Some((id, spelling, is_special)) = entries.next() {
            if entries.peek().is_some_and(|(next, ..)| *next == id) {
                continue;
            }
            let entry = table.entry(&spelling, is_special);
            table.entries[id as usize] = entry.ok_or_else(|| bad("it is too large".to_owned()))?;
        }
        Ok(table)
    }

    /// The entry of a spelling; None if the table would be too large.
    fn entry(&mut self, spelling: &[u8], is_special: bool) -> Option<Entry> {
        let mut bytes = [0; MAX_INLINE_BYTES];
        if let Some(inline) = bytes.get_mut(..spelling.len()) {
            inline.copy_from_slice(spelling);
            return Some(Entry {
                bytes,
                len: u8::try_from(spelling.len()).ok()?,
                is_special,
            });
        }
        bytes[..4].copy_from_slice(&to_u32(self.long.len())?.to_le_bytes());
        bytes[4..8].copy_from_slice(&to_u32(spelling.len())?.to_le_bytes());
        self.long.extend_from_slice(spelling);
        Some(Entry {
            bytes,
            len: LONG,
            is_special,
        })
    }

    /// Largest id plus one; gaps below it stand for nothing.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no id at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The bytes of `id`, empty outside the vocabulary.
    #[must_use]
    pub fn bytes(&self, id: u32) -> &[u8] {
        match self.entries.get(id as usize) {
            Some(entry) => self.spelling(entry),
            None => &[],
        }
    }

    /// The bytes of `id`, none if they would be hidden.
    pub(crate) fn shown(&self, id: u32, skip_special: bool) -> &[u8] {
        match self.entries.get(id as usize) {
            Some(entry) if !(skip_special && entry.is_special) => self.spelling(entry),
            _ => &[],
        }
    }

    fn spelling<'a>(&'a self, entry: &'a Entry) -> &'a [u8] {
        if entry.len != LONG {
            return &entry.bytes[..usize::from(entry.len)];
        }
        let start = from_le_bytes(&entry.bytes[..4]);
        &self.long[start..start + from_le_bytes(&entry.bytes[4..8])]
    }

    /// Whether `id` is a special token.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        let entry = self.entries.get(id as usize);
        entry.is_some_and(|entry| entry.is_special)
    }

    /// All special ids, ascending.
    #[must_use]
    pub fn special_ids(&self) -> Vec<u32> {
        (0u32..)
            .zip(&self.entries)
            .filter_map(|(id, entry)| entry.is_special.then_some(id))
            .collect()
    }

    /// Decodes all `ids` at once; broken UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            bytes.extend_from_slice(self.shown(id, skip_special));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn from_le_bytes(bytes: &[u8]) -> usize {
    let join = |number, &byte| number << 8 | usize::from(byte);
    bytes.iter().rev().fold(0, join)
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
