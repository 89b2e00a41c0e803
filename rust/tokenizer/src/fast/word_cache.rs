//! Ids of words seen before.
//!
//! Words are kept in the order in which they were seen first. Frequent words come early in any text, so
//! the entries that are used most lie side by side, and in the nearest caches. When the cache is full it
//! starts anew.

use super::hash::Key;
use super::word_key::{key, MAX_BYTES as MAX_WORD_BYTES};
use std::ops::Range;

/// Of words of more ids only that they are such is kept.
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
    /// Or [`OPEN`], with a name in `ids`, or [`NOT_KEPT`].
    num_ids: u32,
}

/// The ids are being looked for.
const OPEN: u32 = u32::MAX;
/// There are too many ids.
const NOT_KEPT: u32 = OPEN - 1;

/// What the cache says of a word.
pub(crate) enum Found {
    /// Its ids have been appended.
    Ids,
    /// It was new a moment ago, under this name.
    Open(u32),
    /// Its ids are to be found, and to be told if there is a place for them.
    New(Option<Place>),
}

/// Where the ids of a new word go; valid until the cache is cleared.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Short(usize),
    Long(usize),
}

impl WordCache {
    /// Appends the ids of the word in `text`; if they are not known the word is new, and `name` stands for
    /// them until they are told.
    #[inline]
    pub(crate) fn find(
        &mut self,
        text: &[u8],
        word: &Range<usize>,
        name: u32,
        out: &mut Vec<u32>,
    ) -> Found {
        if word.len() <= MAX_SHORT_BYTES {
            let max_words = MAX_SHORT_WORDS;
            self.short
                .find(key::<2>(text, word), name, max_words, Place::Short, out)
        } else if word.len() <= MAX_WORD_BYTES {
            let max_words = MAX_LONG_WORDS;
            self.long
                .find(key::<4>(text, word), name, max_words, Place::Long, out)
        } else {
            Found::New(None)
        }
    }

    /// The ids of a word that was new.
    pub(crate) fn tell(&mut self, place: Place, ids: &[u32]) {
        match place {
            Place::Short(entry) => self.short.entries[entry].set(ids),
            Place::Long(entry) => self.long.entries[entry].set(ids),
        }
    }

    /// Starts anew if there may be no room for as many words more; no word may be open.
    pub(crate) fn make_room(&mut self, num_words: usize) {
        self.short.make_room(num_words, MAX_SHORT_WORDS);
        self.long.make_room(num_words, MAX_LONG_WORDS);
    }
}

impl<const WORDS: usize, const IDS: usize> Entry<WORDS, IDS> {
    fn set(&mut self, ids: &[u32]) {
        if ids.len() <= IDS {
            self.ids[..ids.len()].copy_from_slice(ids);
            self.num_ids = to_u32(ids.len());
        } else {
            self.num_ids = NOT_KEPT;
        }
    }

    fn write(&self, out: &mut Vec<u32>) {
        if self.num_ids == 1 {
            out.push(self.ids[0]);
        } else {
            out.extend_from_slice(&self.ids[..self.num_ids as usize]);
        }
    }
}

impl<const WORDS: usize, const IDS: usize> Table<WORDS, IDS> {
    #[inline]
    fn find(
        &mut self,
        key: [u64; WORDS],
        name: u32,
        max_words: usize,
        place: impl Fn(usize) -> Place,
        out: &mut Vec<u32>,
    ) -> Found {
        if self.slots.is_empty() {
            self.allocate(max_words);
        }
        let hash = self.hash_key.hash(&key);
        let hot = &mut self.hot[hash % NUM_HOT];
        if hot.key == key {
            hot.write(out);
            return Found::Ids;
        }
        let mask = self.slots.len() - 1;
        let mut slot = hash & mask;
        while let Some(index) = self.slots[slot].checked_sub(1) {
            let entry = &self.entries[index as usize];
            if entry.key == key {
                return match entry.num_ids {
                    OPEN => Found::Open(entry.ids[0]),
                    NOT_KEPT => Found::New(None),
                    _ => {
                        *hot = *entry;
                        hot.write(out);
                        Found::Ids
                    }
                };
            }
            slot = (slot + 1) & mask;
        }
        if self.entries.len() == max_words {
            return Found::New(None);
        }
        let mut ids = [0; IDS];
        ids[0] = name;
        self.entries.push(Entry {
            key,
            ids,
            num_ids: OPEN,
        });
        self.slots[slot] = to_u32(self.entries.len());
        Found::New(Some(place(self.entries.len() - 1)))
    }

    #[cold]
    fn allocate(&mut self, max_words: usize) {
        self.slots.resize(max_words * 2, 0);
        let empty = Entry {
            key: [0; WORDS],
            ids: [0; IDS],
            num_ids: 0,
        };
        self.hot.resize(NUM_HOT, empty);
    }

    fn make_room(&mut self, num_words: usize, max_words: usize) {
        if self.entries.len() + num_words > max_words {
            self.slots.fill(0);
            self.entries.clear();
        }
    }
}

fn to_u32(len: usize) -> u32 {
    u32::try_from(len).expect("the cache is small")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks for a word whose ids are `0..num_ids`, and tells them if it is new.
    fn ask(cache: &mut WordCache, word: &str, num_ids: u32) -> bool {
        let mut out = vec![9];
        let ids: Vec<u32> = (0..num_ids).collect();
        match cache.find(word.as_bytes(), &(0..word.len()), 5, &mut out) {
            Found::Ids => {
                assert_eq!(out, [vec![9], ids].concat(), "{word}");
                return true;
            }
            Found::New(Some(place)) => cache.tell(place, &ids),
            Found::New(None) => {}
            Found::Open(_) => unreachable!("{word} has been told"),
        }
        assert_eq!(out, [9]);
        false
    }

    #[test]
    fn a_word_is_new_once_and_a_large_one_each_time() {
        let mut cache = WordCache::default();
        let [long, longer] = [20, 32].map(|len| "x".repeat(len));
        for (word, num_ids, is_kept) in [
            ("ab", 1, true),
            ("cd", 3, true),
            ("ef", 4, false),
            (&long, 7, true),
            (&long[1..], 8, false),
            (&longer, 1, false),
        ] {
            assert!(!ask(&mut cache, word, num_ids));
            assert_eq!(ask(&mut cache, word, num_ids), is_kept, "{word}");
            assert_eq!(ask(&mut cache, word, num_ids), is_kept, "{word}");
        }
    }

    #[test]
    fn a_word_goes_by_its_name_until_its_ids_are_told() {
        let mut cache = WordCache::default();
        let mut out = Vec::new();
        let Found::New(Some(place)) = cache.find(b"word", &(0..4), 7, &mut out) else {
            panic!("it is new");
        };
        let again = cache.find(b"word", &(0..4), 8, &mut out);
        assert!(matches!(again, Found::Open(7)));
        cache.tell(place, &[3, 4]);
        let known = cache.find(b"word", &(0..4), 9, &mut out);
        assert!(matches!(known, Found::Ids));
        assert_eq!(out, [3, 4]);
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
        let num_words = MAX_SHORT_WORDS * 2 + 10;
        for round in 0..2 {
            for number in 0..num_words {
                let word = number.to_string();
                assert!(!ask(&mut cache, &word, 1), "{round}");
                assert!(ask(&mut cache, &word, 1), "{round}");
                cache.make_room(100);
            }
            assert!(cache.short.entries.len() <= MAX_SHORT_WORDS - 100);
        }
        // Without room words are encoded each time.
        for number in 0..MAX_SHORT_WORDS {
            ask(&mut cache, &format!(" {number}"), 1);
        }
        assert!(!ask(&mut cache, "new", 1));
        assert!(!ask(&mut cache, "new", 1));
    }
}
