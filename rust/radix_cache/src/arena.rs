//! Where nodes live: slots addressed by index, with a generation that tells stale handles apart.

use std::ops::{Index, IndexMut};

use crate::error::CacheError;
use crate::page::{page_count, PageId};

/// No node.
pub(crate) const NIL: u32 = u32::MAX;

/// The node that stands for "nothing cached" in namespaces without a root. It never has children.
pub(crate) const VOID: u32 = 0;

/// Names a node of the tree, that is, a cached prefix.
///
/// It keeps its meaning across splits. Once the node is evicted or flushed the handle is stale,
/// which every use reports; a lock prevents that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeHandle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// One edge of the tree with the pages along it.
#[derive(Debug)]
pub(crate) struct Node {
    /// Pages of this node only; empty for roots. Their tokens are in the token store.
    pub(crate) pages: Box<[PageId]>,
    /// [`NIL`] for roots.
    pub(crate) parent: u32,
    /// Root of the namespace; its own index for roots.
    pub(crate) root: u32,
    pub(crate) num_children: u32,
    /// Pages from the root to the end of this node.
    pub(crate) end_page: u32,
    /// Receipts on this node or below.
    pub(crate) lock_count: u32,
    /// Neighbours in the eviction order, for unlocked nodes that are not roots.
    pub(crate) older: u32,
    pub(crate) newer: u32,
    /// Key in the child index, and the next node with the same key.
    pub(crate) child_key: u64,
    pub(crate) next_same_key: u32,
}

impl Node {
    /// An unlocked, unlinked node without children.
    pub(crate) fn new(pages: Box<[PageId]>, parent: u32, root: u32, end_page: u32) -> Self {
        Self {
            pages,
            parent,
            root,
            num_children: 0,
            end_page,
            lock_count: 0,
            older: NIL,
            newer: NIL,
            child_key: 0,
            next_same_key: NIL,
        }
    }

    pub(crate) fn is_root(&self) -> bool {
        self.parent == NIL
    }

    pub(crate) fn num_pages(&self) -> u32 {
        page_count(self.pages.len())
    }
}

#[derive(Debug)]
struct Slot {
    /// Odd while the slot is in use; counts up at each change.
    generation: u32,
    node: Node,
}

/// All nodes. Indexing a slot that is not in use is a bug of this crate.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
}

impl Arena {
    /// An arena with [`VOID`] in it.
    pub(crate) fn new() -> Self {
        let mut arena = Self::default();
        let void = arena.insert(Node::new(Box::default(), NIL, VOID, 0));
        debug_assert_eq!(void, VOID);
        arena
    }

    pub(crate) fn insert(&mut self, node: Node) -> u32 {
        if let Some(index) = self.vacant.pop() {
            let slot = &mut self.slots[index as usize];
            slot.generation = slot.generation.wrapping_add(1);
            slot.node = node;
            return index;
        }
        let index = u32::try_from(self.slots.len()).expect("a node holds a page or is a root");
        self.slots.push(Slot {
            generation: 1,
            node,
        });
        index
    }

    /// Empties a slot; handles to it become stale.
    pub(crate) fn remove(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.generation % 2 == 1, "node removed twice");
        slot.generation = slot.generation.wrapping_add(1);
        slot.node.pages = Box::default();
        self.vacant.push(index);
    }

    pub(crate) fn handle(&self, index: u32) -> NodeHandle {
        NodeHandle {
            index,
            generation: self.slots[index as usize].generation,
        }
    }

    pub(crate) fn resolve(&self, handle: NodeHandle) -> Result<u32, CacheError> {
        match self.slots.get(handle.index as usize) {
            Some(slot) if slot.generation == handle.generation => Ok(handle.index),
            _ => Err(CacheError::StaleHandle {
                index: handle.index,
                generation: handle.generation,
            }),
        }
    }

    /// Nodes in use, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Node)> {
        (0_u32..)
            .zip(&self.slots)
            .filter(|(_, slot)| slot.generation % 2 == 1)
            .map(|(index, slot)| (index, &slot.node))
    }

    pub(crate) fn num_slots(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn num_vacant(&self) -> usize {
        self.vacant.len()
    }
}

impl Index<u32> for Arena {
    type Output = Node;

    fn index(&self, index: u32) -> &Node {
        let slot = &self.slots[index as usize];
        debug_assert!(slot.generation % 2 == 1, "vacant node used");
        &slot.node
    }
}

impl IndexMut<u32> for Arena {
    fn index_mut(&mut self, index: u32) -> &mut Node {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.generation % 2 == 1, "vacant node used");
        &mut slot.node
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Node {
        Node::new(Box::from([1]), VOID, VOID, 1)
    }

    #[test]
    fn a_handle_is_stale_once_its_slot_is_reused() {
        let mut arena = Arena::new();
        let index = arena.insert(node());
        let handle = arena.handle(index);
        assert_eq!(arena.resolve(handle), Ok(index));
        arena.remove(index);
        assert!(arena.resolve(handle).is_err());
        assert_eq!(arena.insert(node()), index, "slots are reused");
        assert!(arena.resolve(handle).is_err());
        assert_eq!(arena.resolve(arena.handle(index)), Ok(index));
    }

    #[test]
    fn a_handle_out_of_range_is_stale() {
        let handle = NodeHandle {
            index: 9,
            generation: 1,
        };
        assert!(Arena::new().resolve(handle).is_err());
    }
}
