//! Memory of long prompts that have ended, for those that come.
//!
//! A prompt of 128K ids takes half a megabyte. Memory of that size comes from the operating system page by
//! page, at the first touch, which takes longer than all else that its arrival costs.

/// Shorter lists are not kept: the allocator is as fast.
const MIN_IDS: usize = 1 << 15;
/// Ids that all lists together have room for, at most.
const MAX_IDS: usize = 1 << 22;

/// Empty lists of ids.
#[derive(Debug, Default)]
pub(crate) struct SpareIds {
    /// By the room they have.
    lists: Vec<Vec<u32>>,
    num_ids: usize,
}

impl SpareIds {
    /// An empty list with room for so many ids, and not much more.
    pub fn take(&mut self, room: usize) -> Vec<u32> {
        let first = self.lists.partition_point(|list| list.capacity() < room);
        let fits = |list: &Vec<u32>| room >= MIN_IDS && list.capacity() <= 2 * room;
        if !self.lists.get(first).is_some_and(fits) {
            return Vec::with_capacity(room);
        }
        let list = self.lists.remove(first);
        self.num_ids -= list.capacity();
        list
    }

    /// Keeps the memory of a list, rather than that of smaller ones.
    pub fn keep(&mut self, mut list: Vec<u32>) {
        let room = list.capacity();
        if !(MIN_IDS..=MAX_IDS).contains(&room) {
            return;
        }
        while self.num_ids + room > MAX_IDS {
            if self.lists[0].capacity() >= room {
                return;
            }
            self.num_ids -= self.lists.remove(0).capacity();
        }
        list.clear();
        self.num_ids += room;
        let place = self.lists.partition_point(|list| list.capacity() < room);
        self.lists.insert(place, list);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_comes_back_and_a_short_one_does_not() {
        let mut spare = SpareIds::default();
        let [mut long, longer] = [MIN_IDS, 3 * MIN_IDS].map(|room| spare.take(room));
        long.push(7);
        let [at, longer_at] = [long.as_ptr(), longer.as_ptr()];
        spare.keep(longer);
        spare.keep(long);
        spare.keep(Vec::with_capacity(MIN_IDS - 1));
        assert_eq!(spare.lists.len(), 2);
        let again = spare.take(MIN_IDS);
        assert!(again.is_empty());
        assert_eq!(again.as_ptr(), at);
        assert!(spare.take(4 * MIN_IDS).capacity() >= 4 * MIN_IDS);
        assert!(spare.take(5).capacity() < MIN_IDS);
        assert!(spare.take(MIN_IDS + 1).capacity() < 3 * MIN_IDS);
        let next = spare.take(2 * MIN_IDS);
        assert_eq!(next.as_ptr(), longer_at);
        assert_eq!(spare.num_ids, 0);
    }

    #[test]
    fn no_more_than_so_much_is_kept() {
        let mut spare = SpareIds::default();
        for _ in 0..2 * MAX_IDS / MIN_IDS {
            spare.keep(Vec::with_capacity(MIN_IDS));
        }
        assert_eq!(spare.lists.len(), MAX_IDS / MIN_IDS);
        assert_eq!(spare.num_ids, MAX_IDS);
        // Longer ones take the place of shorter ones.
        spare.keep(Vec::with_capacity(2 * MIN_IDS));
        assert_eq!(spare.take(2 * MIN_IDS).capacity(), 2 * MIN_IDS);
        assert_eq!(spare.num_ids, MAX_IDS - 2 * MIN_IDS);
    }
}
