//! Ids of messages encoded before, so that the next turn of a conversation encodes only what is new.
//!
//! A message is the text between two added tokens. Its ids do not depend on what stands before it,
//! so an entry serves every prompt that holds the message: the prefix that a conversation shares with
//! its last turn costs one look-up a message.

use crate::fast::hash::hash_bytes;
use std::collections::hash_map::RandomState;
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex};

/// Shorter messages cost less to encode than to keep.
const MIN_MESSAGE_BYTES: usize = 128;
/// What an entry costs besides text and ids.
const ENTRY_BYTES: usize = 128;
const NONE: u32 = u32::MAX;

/// What the cache holds and did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Messages held.
    pub entries: usize,
    /// Bytes of their texts, ids and entries; at most the limit the cache was made with.
    pub bytes: usize,
    /// Messages found.
    pub hits: u64,
    /// Messages looked for and not found.
    pub misses: u64,
}

/// Least recently used out first, limited by bytes.
pub(crate) struct MessageCache {
    /// Chosen at random, so that nobody can prepare texts that collide.
    seed: u64,
    limit_bytes: usize,
    lru: Mutex<Lru>,
}

#[derive(Default)]
struct Lru {
    slots: HashMap<u64, u32>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Ends of the list of entries in order of use.
    newest: Option<u32>,
    oldest: Option<u32>,
    stats: CacheStats,
}

struct Entry {
    hash: u64,
    text: Box<str>,
    ids: Arc<[u32]>,
    newer: u32,
    older: u32,
}

impl MessageCache {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        Self {
            seed: RandomState::new().hash_one(0u64),
            limit_bytes,
            lru: Mutex::default(),
        }
    }

    pub(crate) fn wants(&self, text: &str) -> bool {
        text.len() >= MIN_MESSAGE_BYTES && text.len() * 2 + ENTRY_BYTES <= self.limit_bytes
    }

    /// The ids of `text`, if it was put before.
    pub(crate) fn get(&self, text: &str) -> Option<Arc<[u32]>> {
        let hash = hash_bytes(self.seed, text.as_bytes());
        // A cache that a panic broke is never used again.
        let mut lru = self.lru.lock().ok()?;
        let found = lru.slots.get(&hash).copied();
        let Some(slot) = found.filter(|&slot| *lru.entries[slot as usize].text == *text) else {
            lru.stats.misses += 1;
            return None;
        };
        lru.stats.hits += 1;
        lru.unlink(slot);
        lru.push_newest(slot);
        Some(Arc::clone(&lru.entries[slot as usize].ids))
    }

    /// Keeps `ids` for `text`; what was used longest ago goes.
    pub(crate) fn put(&self, text: &str, ids: Arc<[u32]>) {
        let hash = hash_bytes(self.seed, text.as_bytes());
        let entry = Entry {
            hash,
            text: text.into(),
            ids,
            newer: NONE,
            older: NONE,
        };
        let bytes = entry.bytes();
        let Ok(mut lru) = self.lru.lock() else {
            return;
        };
        if let Some(&slot) = lru.slots.get(&hash) {
            lru.remove(slot);
        }
        if bytes > self.limit_bytes {
            return;
        }
        while lru.stats.bytes + bytes > self.limit_bytes {
            let Some(oldest) = lru.oldest else {
                break;
            };
            lru.remove(oldest);
        }
        lru.insert(entry);
    }

    pub(crate) fn stats(&self) -> CacheStats {
        self.lru.lock().map(|lru| lru.stats).unwrap_or_default()
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() + self.ids.len() * 4 + ENTRY_BYTES
    }
}

impl Lru {
    fn insert(&mut self, entry: Entry) {
        self.stats.entries += 1;
        self.stats.bytes += entry.bytes();
        let hash = entry.hash;
        let slot = if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = entry;
            slot
        } else {
            self.entries.push(entry);
            u32::try_from(self.entries.len() - 1).expect("entries are larger than one byte")
        };
        self.slots.insert(hash, slot);
        self.push_newest(slot);
    }

    fn remove(&mut self, slot: u32) {
        self.unlink(slot);
        let entry = &mut self.entries[slot as usize];
        self.stats.entries -= 1;
        self.stats.bytes -= entry.bytes();
        self.slots.remove(&entry.hash);
        entry.text = Box::default();
        entry.ids = Arc::default();
        self.free.push(slot);
    }

    fn unlink(&mut self, slot: u32) {
        let Entry { newer, older, .. } = self.entries[slot as usize];
        match newer {
            NONE => self.newest = Some(older).filter(|&slot| slot != NONE),
            newer => self.entries[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = Some(newer).filter(|&slot| slot != NONE),
            older => self.entries[older as usize].newer = newer,
        }
    }

    fn push_newest(&mut self, slot: u32) {
        let older = self.newest.unwrap_or(NONE);
        let entry = &mut self.entries[slot as usize];
        entry.newer = NONE;
        entry.older = older;
        match older {
            NONE => self.oldest = Some(slot),
            older => self.entries[older as usize].newer = slot,
        }
        self.newest = Some(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(name: u8, len: usize) -> String {
        char::from(b'a' + name).to_string().repeat(len)
    }

    fn ids(name: u8) -> Arc<[u32]> {
        vec![u32::from(name); 3].into()
    }

    proptest! {
        #[test]
        fn what_was_used_last_stays_within_the_limit(
            uses in prop::collection::vec((0..12u8, 128..400usize), 1..200),
        ) {
            let limit = 2_000;
            let cache = MessageCache::new(limit);
            // The model: texts in order of use, the newest last.
            let mut held: Vec<String> = Vec::new();
            let size = |text: &String| text.len() + 3 * 4 + ENTRY_BYTES;
            for (name, len) in uses {
                let text = text(name, len);
                let found = cache.get(&text);
                let known = held.iter().position(|other| *other == text);
                prop_assert_eq!(found.is_some(), known.is_some());
                if let Some(known) = known {
                    prop_assert_eq!(found, Some(ids(name)));
                    let used = held.remove(known);
                    held.push(used);
                    continue;
                }
                cache.put(&text, ids(name));
                held.push(text);
                while held.iter().map(size).sum::<usize>() > limit {
                    held.remove(0);
                }
                let stats = cache.stats();
                prop_assert_eq!(stats.entries, held.len());
                prop_assert_eq!(stats.bytes, held.iter().map(size).sum::<usize>());
            }
        }
    }

    #[test]
    fn a_text_put_twice_is_held_once() {
        let cache = MessageCache::new(4_000);
        let text = text(0, 200);
        cache.put(&text, ids(1));
        cache.put(&text, ids(2));
        assert_eq!(cache.get(&text), Some(ids(2)));
        assert_eq!(cache.stats().entries, 1);
    }

    #[test]
    fn small_and_oversized_messages_are_not_wanted() {
        let cache = MessageCache::new(1_000);
        assert!(!cache.wants(&text(0, 127)));
        assert!(cache.wants(&text(0, 128)));
        assert!(!cache.wants(&text(0, 600)));
        cache.put(&text(0, 1_000), ids(0));
        assert_eq!(cache.stats(), CacheStats::default());
        assert!(!MessageCache::new(0).wants(&text(0, 128)));
    }
}
