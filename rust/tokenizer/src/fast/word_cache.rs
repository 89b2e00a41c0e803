//! Ids of words seen before.
//!
//! Words are kept in the order in which they were seen first. Frequent words come early in any text, so
//! the entries that are used most lie side by side, and in the nearest caches. When the cache is full it
//! starts anew.

use super::hash::Key;
use std::ops::Range;

/// Longer words, and words of more ids, are not kept.
const MAX_WORD_BYTES: usize = 31;
const MAX_IDS: usize = 7;
/// Words up to this length and number of ids take half the room.
const MAX_SHORT_BYTES: usize = 15;
const MAX_SHORT_IDS: usize = 3;

const MAX_SHORT_WORDS: usize = 1 << 15;
const MAX_LONG_WORDS: usize = 1 << 12;
const NUM_HOT: usize = 1 << 10;

/// A cache of at most 2 MiB that one thread uses at a time.
#[derive(Default)]
pub(crate) struct WordCache {
    short: Table<2, MAX_SHORT_IDS>,
    long: Table<4, MAX_IDS>,
}

/// Words of up to 8 * `WORDS` - 1 bytes and `IDS` ids.
struct Table<const WORDS: usize, const IDS: usize> {
    /// Chosen at random: nobody can prepare words that collide, which would make each look-up a walk
    /// past all of them.
    hash_key: Key,
    /// The entries used last, by hash: a copy that fits the nearest cache.
    hot: Vec<Entry<WORDS, IDS>>,
    /// Index of an entry plus one, by hash; open addressing.
    slots: Vec<u32>,
    entries: Vec<Entry<WORDS, IDS>>,
}

impl<const WORDS: usize, const IDS: usize> Default for Table<WORDS, IDS> {
    fn default() -> Self {
        Self {
            hash_key: Key::random(),
            hot: Vec::new(),
            slots: Vec::new(),
            entries: Vec::new(),
        }
    }
}

/// The bytes of a word, zeros, and its length in the last byte; then its ids.
#[derive(Clone, Copy)]
struct Entry<const WORDS: usize, const IDS: usize> {
    key: [u64; WORDS],
    ids: [u32; IDS],
    num_ids: u32,
}

impl WordCache {
    /// Appends the ids of the word in `text`, which are those that `encode` appends.
    pub(crate) fn encode(
        &mut self,
        text: &[u8],
        word: Range<usize>,
        out: &mut Vec<u32>,
        encode: impl FnOnce(&[u8], &mut Vec<u32>),
    ) {
        if word.len() <= MAX_SHORT_BYTES {
            let key = key::<2>(text, &word);
            self.short.encode(key, MAX_SHORT_WORDS, out, |out| {
                encode(&text[word], out);
            });
        } else if word.len() <= MAX_WORD_BYTES {
            let key = key::<4>(text, &word);
            self.long.encode(key, MAX_LONG_WORDS, out, |out| {
                encode(&text[word], out);
            });
        } else {
            encode(&text[word], out);
        }
    }
}

impl<const WORDS: usize, const IDS: usize> Entry<WORDS, IDS> {
    fn write(&self, out: &mut Vec<u32>) {
        if self.num_ids == 1 {
            out.push(self.ids[0]);
        } else {
            out.extend_from_slice(&self.ids[..self.num_ids as usize]);
        }
    }
}

impl<const WORDS: usize, const IDS: usize> Table<WORDS, IDS> {
    fn encode(
        &mut self,
        key: [u64; WORDS],
        max_words: usize,
        out: &mut Vec<u32>,
        encode: impl FnOnce(&mut Vec<u32>),
    ) {
        if self.slots.is_empty() {
            self.slots.resize(max_words * 2, 0);
            let empty = Entry {
                key: [0; WORDS],
                ids: [0; IDS],
                num_ids: 0,
            };
            self.hot.resize(NUM_HOT, empty);
        }
        let hash = self.hash_key.hash(&key);
        let hot = &mut self.hot[hash % NUM_HOT];
        if hot.key == key {
            hot.write(out);
            return;
        }
        let mask = self.slots.len() - 1;
        let mut slot = hash & mask;
        while self.slots[slot] != 0 {
            let entry = &self.entries[self.slots[slot] as usize - 1];
            if entry.key == key {
                *hot = *entry;
                hot.write(out);
                return;
            }
            slot = (slot + 1) & mask;
        }
        let first = out.len();
        encode(out);
        let ids = &out[first..];
        if ids.len() > IDS {
            return;
        }
        if self.entries.len() == max_words {
            self.slots.fill(0);
            self.entries.clear();
            slot = hash & mask;
        }
        let mut kept = [0; IDS];
        kept[..ids.len()].copy_from_slice(ids);
        self.entries.push(Entry {
            key,
            ids: kept,
            num_ids: to_u32(ids.len()),
        });
        self.slots[slot] = to_u32(self.entries.len());
    }
}

fn key<const WORDS: usize>(text: &[u8], word: &Range<usize>) -> [u64; WORDS] {
    let len = word.len();
    let window = text.get(word.start..word.start + WORDS * 8);
    let mut padded = [0u8; MAX_WORD_BYTES + 1];
    let bytes = window.unwrap_or_else(|| {
        padded[..len].copy_from_slice(&text[word.clone()]);
        &padded
    });
    let mut key = [0u64; WORDS];
    for (index, (value, chunk)) in key.iter_mut().zip(bytes.chunks_exact(8)).enumerate() {
        let whole = u64::from_le_bytes([
            chunk[0], chunk[1], chunk[2], chunk[3], chunk[4], chunk[5], chunk[6], chunk[7],
        ]);
        // What follows the word is masked away.
        *value = whole & MASKS[len.saturating_sub(index * 8).min(8)];
    }
    key[WORDS - 1] |= (len as u64) << 56;
    key
}

/// The lowest n bytes.
const MASKS: [u64; 9] = [
    0,
    0xFF,
    0xFFFF,
    0x00FF_FFFF,
    0xFFFF_FFFF,
    0x00FF_FFFF_FFFF,
    0xFFFF_FFFF_FFFF,
    0x00FF_FFFF_FFFF_FFFF,
    u64::MAX,
];

fn to_u32(len: usize) -> u32 {
    u32::try_from(len).expect("the cache is small")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_different_words_differ_wherever_they_stand() {
        let words = [
            "",
            "a",
            "a\0",
            "\0",
            "\0\0",
            "abcdefgh",
            "abcdefghi",
            "abcdefghijklmno",
        ];
        let mut keys = Vec::new();
        for word in words {
            let alone = key::<2>(word.as_bytes(), &(0..word.len()));
            let inside = format!("<{word}>{}", "x".repeat(40));
            assert_eq!(alone, key(inside.as_bytes(), &(1..1 + word.len())));
            assert!(!keys.contains(&alone), "{word:?}");
            keys.push(alone);
        }
    }

    #[test]
    fn a_word_is_encoded_once_and_a_large_one_each_time() {
        let mut cache = WordCache::default();
        let [long, longer] = [20, 32].map(|len| "x".repeat(len));
        for (word, num_ids, num_calls) in [
            ("ab", 1, 1),
            ("cd", 3, 1),
            ("ef", 4, 3),
            (&long, 7, 1),
            (&long[1..], 8, 3),
            (&longer, 1, 3),
        ] {
            let mut calls = 0;
            for _ in 0..3 {
                let mut out = vec![9];
                cache.encode(word.as_bytes(), 0..word.len(), &mut out, |given, out| {
                    assert_eq!(given, word.as_bytes());
                    calls += 1;
                    out.extend(0..num_ids);
                });
                assert_eq!(out, [vec![9], (0..num_ids).collect()].concat());
            }
            assert_eq!(calls, num_calls, "{word}");
        }
    }

    /// Words that share a slot in one table are spread in another.
    #[test]
    fn which_words_collide_differs_from_cache_to_cache() {
        let [first, second] = [Key::random(), Key::random()];
        let slots = MAX_SHORT_WORDS * 2;
        let words = (0..400_000u32).map(|number| {
            let word = format!(" {number:07}");
            key::<2>(word.as_bytes(), &(0..word.len()))
        });
        let colliding: Vec<_> = words.filter(|key| first.hash(key) % slots < 64).collect();
        assert!(colliding.len() > 200);
        let near = |key: &&[u64; 2]| second.hash(*key) % slots < 64;
        assert!(colliding.iter().filter(near).count() < 20);
    }

    #[test]
    fn a_full_cache_starts_anew() {
        let mut cache = WordCache::default();
        let num_words = u32::try_from(MAX_SHORT_WORDS * 2 + 10).unwrap();
        for round in 0..2 {
            for number in 0..num_words {
                let word = number.to_string();
                let mut out = Vec::new();
                cache.encode(word.as_bytes(), 0..word.len(), &mut out, |_, out| {
                    out.push(number);
                });
                assert_eq!(out, [number], "{round}");
            }
            assert!(cache.short.entries.len() <= MAX_SHORT_WORDS);
        }
    }
}
