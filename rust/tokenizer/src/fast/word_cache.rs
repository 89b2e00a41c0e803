//! Ids of words seen before: one fixed table, a new word replaces what was in its place.

use super::hash::hash_bytes;

/// Longer words, and words of more ids, are not kept.
const MAX_WORD_BYTES: usize = 31;
const MAX_WORD_IDS: usize = 7;
const NUM_ENTRIES: usize = 1 << 14;

/// 64 bytes: one cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Entry {
    ids: [u32; MAX_WORD_IDS],
    word: [u8; MAX_WORD_BYTES],
    word_len: u8,
    num_ids: u8,
}

/// A cache of 1 MiB that one thread uses at a time.
pub(crate) struct WordCache {
    entries: Vec<Entry>,
}

impl Default for WordCache {
    fn default() -> Self {
        let empty = Entry {
            ids: [0; MAX_WORD_IDS],
            word: [0; MAX_WORD_BYTES],
            word_len: 0,
            num_ids: 0,
        };
        Self {
            entries: vec![empty; NUM_ENTRIES],
        }
    }
}

impl WordCache {
    /// Appends the ids of `word`, which are those that `encode` appends.
    pub(crate) fn encode(
        &mut self,
        word: &[u8],
        out: &mut Vec<u32>,
        encode: impl FnOnce(&mut Vec<u32>),
    ) {
        if word.len() > MAX_WORD_BYTES {
            encode(out);
            return;
        }
        let entry = &mut self.entries[slot(word)];
        if usize::from(entry.word_len) == word.len() && entry.word[..word.len()] == *word {
            out.extend_from_slice(&entry.ids[..usize::from(entry.num_ids)]);
            return;
        }
        let first = out.len();
        encode(out);
        let ids = &out[first..];
        if ids.len() <= MAX_WORD_IDS {
            entry.ids[..ids.len()].copy_from_slice(ids);
            entry.word[..word.len()].copy_from_slice(word);
            entry.num_ids = to_u8(ids.len());
            entry.word_len = to_u8(word.len());
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "only the low bits of the hash choose a slot"
)]
fn slot(word: &[u8]) -> usize {
    hash_bytes(0, word) as usize % NUM_ENTRIES
}

fn to_u8(len: usize) -> u8 {
    u8::try_from(len).expect("words are shorter than 32 bytes")
}
