//! What goes when pages are needed: unlocked leaves, least recently used first.
//!
//! One list (`order.rs`) holds every unlocked node, oldest use first. A use marks a path from its
//! end up to the root, so a parent always comes after its children; and the ancestors of a locked
//! node are locked. Hence the oldest node of the list is always a leaf, the next victim is found
//! without a search, and a parent that becomes a leaf already stands where its last use puts it.

use crate::arena::VOID;
use crate::cache::RadixCache;
use crate::error::CacheError;
use crate::page::page_count;

impl RadixCache {
    /// Drops unlocked leaves, least recently used first, until at least `count` pages went to the
    /// free list or nothing evictable is left; returns how many pages went.
    ///
    /// Leaves go whole, so it may be more than `count`. The cost depends on what goes, not on what
    /// stays.
    pub fn evict(&mut self, count: u32) -> u32 {
        let mut freed = 0;
        while freed < count {
            let Some(leaf) = self.order.oldest() else {
                break;
            };
            freed += self.remove_leaf(leaf);
        }
        freed
    }

    /// Empties the tree; returns the pages that went to the free list.
    ///
    /// Held pages stay with their holders.
    ///
    /// # Errors
    /// [`CacheError::Locked`] while any receipt is live; nothing has changed then.
    pub fn flush(&mut self) -> Result<u32, CacheError> {
        if self.num_receipts > 0 {
            return Err(CacheError::Locked {
                num_receipts: self.num_receipts,
                num_pages: self.num_locked(),
            });
        }
        Ok(self.evict(u32::MAX))
    }

    /// Marks the path from `node` to the root as just used.
    pub(crate) fn touch(&mut self, mut node: u32) {
        while !self.arena[node].is_root() && self.arena[node].lock_count == 0 {
            self.order.remove(&mut self.arena, node);
            self.order.push_newest(&mut self.arena, node);
            node = self.arena[node].parent;
        }
    }

    /// Drops a root that neither holds nor is held; without this, salts would pile up.
    pub(crate) fn prune_root(&mut self, root: u32) {
        let node = &self.arena[root];
        if root != VOID && node.num_children == 0 && node.lock_count == 0 {
            self.namespaces.remove(root);
            self.arena.remove(root);
        }
    }

    fn remove_leaf(&mut self, leaf: u32) -> u32 {
        debug_assert_eq!(
            self.arena[leaf].num_children, 0,
            "children go before parents"
        );
        debug_assert_eq!(
            self.arena[leaf].lock_count, 0,
            "locked nodes are not listed"
        );
        self.order.remove(&mut self.arena, leaf);
        self.children.remove(&mut self.arena, leaf);
        let pages = std::mem::take(&mut self.arena[leaf].pages);
        let (parent, freed) = (self.arena[leaf].parent, page_count(pages.len()));
        self.pool.release_tree(&pages);
        self.num_evictable -= freed;
        self.arena.remove(leaf);
        self.arena[parent].num_children -= 1;
        if self.arena[parent].is_root() {
            self.prune_root(parent);
        }
        freed
    }
}
