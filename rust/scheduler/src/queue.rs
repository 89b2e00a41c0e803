//! The waiting requests in the order of their arrival; retracted ones come first.
use std::collections::VecDeque;

use crate::table::Key;

/// Waiting requests.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    keys: VecDeque<Key>,
    /// Leading entries that were retracted: they go before every policy.
    num_retracted: usize,
}

impl Queue {
    pub fn push(&mut self, key: Key) {
        self.keys.push_back(key);
    }

    pub fn push_retracted(&mut self, key: Key) {
        self.keys.push_front(key);
        self.num_retracted += 1;
    }

    pub fn remove(&mut self, key: Key) {
        if let Some(position) = self.keys.iter().position(|other| *other == key) {
            self.keys.remove(position);
            if position < self.num_retracted {
                self.num_retracted -= 1;
            }
        }
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub fn num_retracted(&self) -> usize {
        self.num_retracted
    }

    pub fn iter(&self) -> impl Iterator<Item = Key> + '_ {
        self.keys.iter().copied()
    }

    /// The `index`-th request in arrival order.
    pub fn get(&self, index: usize) -> Option<Key> {
        self.keys.get(index).copied()
    }
}
