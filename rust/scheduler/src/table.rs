//! The table of requests: index with generation, and lookup by id.
use std::collections::HashMap;

use crate::request::{len_u32, Request};

/// Names an entry of the [`Table`]; stale once the request was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

#[derive(Debug)]
struct Entry {
    generation: u32,
    request: Option<Box<Request>>,
}

/// All requests that have not ended.
#[derive(Debug, Default)]
pub(crate) struct Table {
    entries: Vec<Entry>,
    vacant: Vec<u32>,
    by_id: HashMap<u64, Key>,
}

impl Table {
    pub fn insert(&mut self, request: Request) -> Key {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(Entry {
                generation: 0,
                request: None,
            });
            len_u32(self.entries.len() - 1)
        });
        let entry = &mut self.entries[index as usize];
        let key = Key {
            index,
            generation: entry.generation,
        };
        self.by_id.insert(request.spec.request_id, key);
        entry.request = Some(Box::new(request));
        key
    }

    pub fn remove(&mut self, key: Key) -> Option<Box<Request>> {
        let entry = &mut self.entries[key.index as usize];
        if entry.generation != key.generation {
            return None;
        }
        let request = entry.request.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.vacant.push(key.index);
        self.by_id.remove(&request.spec.request_id);
        Some(request)
    }

    pub fn get(&self, key: Key) -> Option<&Request> {
        let entry = &self.entries[key.index as usize];
        (entry.generation == key.generation)
            .then_some(entry.request.as_deref())
            .flatten()
    }

    pub fn get_mut(&mut self, key: Key) -> Option<&mut Request> {
        let entry = &mut self.entries[key.index as usize];
        if entry.generation != key.generation {
            return None;
        }
        entry.request.as_deref_mut()
    }

    /// The request of a key that a list of the scheduler holds: lists hold live keys only.
    pub fn live(&self, key: Key) -> &Request {
        self.get(key).expect("scheduler lists hold live keys")
    }

    /// As [`Table::live`], for changing it.
    pub fn live_mut(&mut self, key: Key) -> &mut Request {
        self.get_mut(key).expect("scheduler lists hold live keys")
    }

    pub fn find(&self, request_id: u64) -> Option<Key> {
        self.by_id.get(&request_id).copied()
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Request> {
        self.entries
            .iter()
            .filter_map(|entry| entry.request.as_deref())
    }

    /// All requests with their keys.
    pub fn entries(&self) -> impl Iterator<Item = (Key, &Request)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(index, entry)| {
                let key = Key {
                    index: len_u32(index),
                    generation: entry.generation,
                };
                Some((key, entry.request.as_deref()?))
            })
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Request> {
        self.entries
            .iter_mut()
            .filter_map(|entry| entry.request.as_deref_mut())
    }
}
