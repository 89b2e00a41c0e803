//! Finds a child by (parent, first page): one hash table for the whole tree.
//!
//! Nodes with equal keys form a chain through `next_same_key`; the reader compares tokens, so a
//! collision costs time only. A split leaves the keys of the split node's children as they are,
//! because the part that keeps the children keeps its index too.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::arena::{Arena, NIL};

/// Passes keys through: they are hashes already.
#[derive(Debug, Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Not used for `u64` keys; kept correct for any.
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// Child key to the first node of its chain.
#[derive(Debug, Default)]
pub(crate) struct ChildIndex {
    heads: HashMap<u64, u32, BuildHasherDefault<KeyHasher>>,
}

impl ChildIndex {
    /// An empty index with room for `capacity` nodes.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            heads: HashMap::with_capacity_and_hasher(capacity, BuildHasherDefault::default()),
        }
    }

    /// First node with this key, or [`NIL`]; others follow through `next_same_key`.
    pub(crate) fn head(&self, key: u64) -> u32 {
        self.heads.get(&key).copied().unwrap_or(NIL)
    }

    pub(crate) fn insert(&mut self, arena: &mut Arena, key: u64, node: u32) {
        let next = self.heads.insert(key, node).unwrap_or(NIL);
        arena[node].child_key = key;
        arena[node].next_same_key = next;
    }

    pub(crate) fn remove(&mut self, arena: &mut Arena, node: u32) {
        let (key, next) = (arena[node].child_key, arena[node].next_same_key);
        let mut previous = self.head(key);
        if previous == node {
            if next == NIL {
                self.heads.remove(&key);
            } else {
                self.heads.insert(key, next);
            }
            return;
        }
        while arena[previous].next_same_key != node {
            previous = arena[previous].next_same_key;
        }
        arena[previous].next_same_key = next;
    }

    /// Chains, for the recount.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.heads.iter().map(|(&key, &head)| (key, head))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Node, VOID};

    fn chain(index: &ChildIndex, arena: &Arena, key: u64) -> Vec<u32> {
        let mut nodes = Vec::new();
        let mut node = index.head(key);
        while node != NIL {
            nodes.push(node);
            node = arena[node].next_same_key;
        }
        nodes
    }

    #[test]
    fn nodes_with_one_key_can_be_removed_in_any_order() {
        for (position, rest) in [(0, [2, 3]), (1, [1, 3]), (2, [1, 2])] {
            let mut arena = Arena::new(0);
            let mut index = ChildIndex::default();
            let nodes: Vec<u32> = (0..3)
                .map(|_| arena.insert(Node::new(Box::from([1]), VOID, VOID, 1)))
                .collect();
            for &node in nodes.iter().rev() {
                index.insert(&mut arena, 5, node);
            }
            assert_eq!(chain(&index, &arena, 5), [1, 2, 3]);
            index.remove(&mut arena, nodes[position]);
            assert_eq!(chain(&index, &arena, 5), rest);
            index.remove(&mut arena, rest[1]);
            index.remove(&mut arena, rest[0]);
            assert_eq!(
                (chain(&index, &arena, 5).len(), index.iter().count()),
                (0, 0)
            );
        }
    }
}
