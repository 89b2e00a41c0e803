//! The waiting requests by priority class, then in the order of their arrival; retracted ones come
//! first in their class.
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use crate::table::Key;

/// Where a request stands in the queue: smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Place {
    /// Priority class, the most urgent one is the smallest.
    pub class: i64,
    /// Arrival order; negative for retracted requests, the last retracted one first.
    pub rank: i64,
}

impl Place {
    /// Whether the request was retracted: then it goes before every policy of its class.
    pub fn is_retracted(self) -> bool {
        self.rank < 0
    }
}

/// Waiting requests.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    keys: BTreeMap<Place, Key>,
    num_retractions: i64,
}

impl Queue {
    /// Adds a request that arrived as number `sequence`; returns its place.
    pub fn push(&mut self, class: i64, sequence: u64, key: Key) -> Place {
        let rank = i64::try_from(sequence).unwrap_or(i64::MAX);
        let place = Place { class, rank };
        self.keys.insert(place, key);
        place
    }

    /// Adds a retracted request; returns its place.
    pub fn push_retracted(&mut self, class: i64, key: Key) -> Place {
        self.num_retractions += 1;
        let rank = -self.num_retractions;
        let place = Place { class, rank };
        self.keys.insert(place, key);
        place
    }

    pub fn remove(&mut self, place: Place) {
        self.keys.remove(&place);
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// All keys in the order of the queue.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Key> + '_ {
        self.keys.values().copied()
    }

    /// Keys of a class that stand before `rank`, those of retracted requests included.
    pub fn before(&self, class: i64, rank: i64) -> impl Iterator<Item = Key> + '_ {
        let first = Place {
            class,
            rank: i64::MIN,
        };
        let end = Place { class, rank };
        self.keys.range(first..end).map(|(_, key)| *key)
    }

    /// All keys with their places, those behind `place` first, then round to it.
    pub fn round_from(&self, place: Place) -> impl Iterator<Item = (Place, Key)> + '_ {
        let behind = self.keys.range((Excluded(place), Unbounded));
        let before = self.keys.range(..=place);
        behind.chain(before).map(|(place, key)| (*place, *key))
    }

    /// The one that every policy but fairness would let wait longest, of those that were never
    /// retracted.
    pub fn last_new(&self) -> Option<(Place, Key)> {
        let mut from_the_end = self.keys.iter().rev();
        from_the_end
            .find(|(place, _)| !place.is_retracted())
            .map(|(place, key)| (*place, *key))
    }
}
