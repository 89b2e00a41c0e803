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
/// It keeps its meaning across splits. Once pages of the node are evicted or flushed the handle is
/// stale, which every use reports; a lock prevents that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeHandle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// One edge of the tree with the pages along it. Fills one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Node {
    /// Pages of this node only, then leftovers of a cut; none for roots. Their tokens are in the
    /// token store.
    storage: Box<[PageId]>,
    /// Key in the child index.
    pub(crate) child_key: u64,
    /// When something below this node, or its right to end a hit, last changed.
    pub(crate) changed_at: u64,
    num_pages: u32,
    /// [`NIL`] for roots.
    pub(crate) parent: u32,
    /// Root of the namespace; its own index for roots.
    pub(crate) root: u32,
    pub(crate) num_children: u32,
    /// Pages from the root to the end of this node.
    pub(crate) end_page: u32,
    /// Receipts on this node or below.
    pub(crate) lock_count: u32,
    /// The next node with the same child key.
    pub(crate) next_same_key: u32,
    /// Odd while the slot is in use; counts up at each change.
    generation: u32,
}

impl Node {
    /// An unlocked, unlinked node without children.
    pub(crate) fn new(pages: Box<[PageId]>, parent: u32, root: u32, end_page: u32) -> Self {
        Self {
            num_pages: page_count(pages.len()),
            storage: pages,
            child_key: 0,
            changed_at: 0,
            parent,
            root,
            num_children: 0,
            end_page,
            lock_count: 0,
            next_same_key: NIL,
            generation: 0,
        }
    }

    pub(crate) fn is_root(&self) -> bool {
        self.parent == NIL
    }

    pub(crate) fn num_pages(&self) -> u32 {
        self.num_pages
    }

    pub(crate) fn pages(&self) -> &[PageId] {
        &self.storage[..self.num_pages as usize]
    }

    /// Pages from the root to the beginning of this node.
    pub(crate) fn start_page(&self) -> u32 {
        self.end_page - self.num_pages
    }

    /// Takes the first `num_pages` pages out; the rest stays.
    pub(crate) fn split_off_head(&mut self, num_pages: u32) -> Box<[PageId]> {
        let (head, tail) = self.pages().split_at(num_pages as usize);
        let head = head.into();
        self.storage = tail.into();
        self.num_pages -= num_pages;
        head
    }

    /// Shortens the node to its first `num_pages` pages; gives up memory by halves only, so that
    /// many small cuts cost as much as one.
    pub(crate) fn cut(&mut self, num_pages: u32) {
        self.end_page -= self.num_pages - num_pages;
        self.num_pages = num_pages;
        if self.storage.len() > 2 * num_pages as usize {
            self.storage = self.pages().into();
        }
    }

    /// Takes all pages out of a node that is about to go.
    pub(crate) fn take_pages(&mut self) -> Vec<PageId> {
        let mut pages = std::mem::take(&mut self.storage).into_vec();
        pages.truncate(self.num_pages as usize);
        self.num_pages = 0;
        pages
    }

    #[cfg(test)]
    pub(crate) fn pages_mut(&mut self) -> &mut [PageId] {
        &mut self.storage[..self.num_pages as usize]
    }
}

/// All nodes. Indexing a slot that is not in use is a bug of this crate.
#[derive(Debug)]
pub(crate) struct Arena {
    slots: Vec<Node>,
    vacant: Vec<u32>,
}

impl Arena {
    /// An arena with [`VOID`] in it and room for `capacity` nodes.
    pub(crate) fn new(capacity: usize) -> Self {
        let mut arena = Self {
            slots: Vec::with_capacity(capacity),
            vacant: Vec::new(),
        };
        let void = arena.insert(Node::new(Box::default(), NIL, VOID, 0));
        debug_assert_eq!(void, VOID);
        arena
    }

    pub(crate) fn insert(&mut self, mut node: Node) -> u32 {
        if let Some(index) = self.vacant.pop() {
            let slot = &mut self.slots[index as usize];
            node.generation = slot.generation.wrapping_add(1);
            *slot = node;
            return index;
        }
        let index = u32::try_from(self.slots.len()).expect("a node holds a page or is a root");
        node.generation = 1;
        self.slots.push(node);
        index
    }

    /// Empties a slot; handles to it become stale.
    pub(crate) fn remove(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.generation % 2 == 1, "node removed twice");
        slot.generation = slot.generation.wrapping_add(1);
        slot.storage = Box::default();
        slot.num_pages = 0;
        self.vacant.push(index);
    }

    /// Makes the handles to a node stale, because it no longer ends where they say.
    pub(crate) fn renew(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(2);
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
        let all = (0_u32..).zip(&self.slots);
        all.filter(|(_, slot)| slot.generation % 2 == 1)
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
        slot
    }
}

impl IndexMut<u32> for Arena {
    fn index_mut(&mut self, index: u32) -> &mut Node {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.generation % 2 == 1, "vacant node used");
        slot
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
        let mut arena = Arena::new(0);
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
    fn a_node_fills_one_cache_line() {
        assert_eq!(size_of::<Node>(), 64);
    }

    #[test]
    fn a_cut_keeps_the_head_and_makes_handles_stale() {
        let mut arena = Arena::new(0);
        let index = arena.insert(Node::new(Box::from([1, 2, 3, 4, 5]), VOID, VOID, 9));
        let handle = arena.handle(index);
        for num_pages in (1..5).rev() {
            arena[index].cut(num_pages);
            arena.renew(index);
            let node = &arena[index];
            let kept = [1, 2, 3, 4];
            assert_eq!(node.pages(), &kept[..num_pages as usize]);
            assert_eq!((node.start_page(), node.end_page), (4, 4 + num_pages));
        }
        assert!(arena.resolve(handle).is_err());
        assert_eq!(arena.resolve(arena.handle(index)), Ok(index));
    }

    #[test]
    fn a_handle_out_of_range_is_stale() {
        let handle = NodeHandle {
            index: 9,
            generation: 1,
        };
        assert!(Arena::new(0).resolve(handle).is_err());
    }
}
