//! Who uses a prefix: lock counts along the path, and the receipt that gives a lock back once.

use crate::arena::{NodeHandle, NIL};
use crate::cache::RadixCache;
use crate::error::CacheError;

/// A lock on a prefix, to be given back with [`RadixCache::unlock`].
///
/// It can be neither copied nor used twice. Dropping it would leave its pages locked for ever; that
/// panics in debug builds.
#[derive(Debug)]
#[must_use = "a lock must be given back with unlock"]
pub struct Receipt {
    node: NodeHandle,
    /// The cache that gave it.
    cache: u64,
    /// Whether it keeps data of the components besides FULL, too.
    keeps_tails: bool,
    is_settled: bool,
}

impl Receipt {
    /// The locked node.
    #[must_use]
    pub fn node(&self) -> NodeHandle {
        self.node
    }

    /// Lets go of the receipt without unlocking, when its cache goes away with it.
    pub fn abandon(mut self) {
        self.is_settled = true;
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        debug_assert!(
            self.is_settled || std::thread::panicking(),
            "a receipt was dropped without unlock"
        );
    }
}

impl RadixCache {
    /// Keeps the prefix that ends with `node` from being evicted until the receipt comes back: all
    /// of its FULL pages, and of the other components the data that a hit at its end needs.
    ///
    /// Splits of the path leave the receipt valid.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`] if the node is gone.
    pub fn lock(&mut self, node: NodeHandle) -> Result<Receipt, CacheError> {
        let end = self.arena.resolve(node)?;
        let mut index = end;
        while index != NIL {
            if self.arena[index].lock_count == 0 && !self.arena[index].is_root() {
                if self.order.is_listed(index) {
                    self.delist(index);
                }
                self.num_evictable -= self.arena[index].num_pages();
            }
            self.arena[index].lock_count += 1;
            index = self.arena[index].parent;
        }
        self.lock_tails(end);
        self.num_receipts += 1;
        self.num_tail_receipts += u32::from(!self.arena[end].is_root());
        Ok(Receipt {
            node,
            cache: self.hasher.identity(),
            keeps_tails: true,
            is_settled: false,
        })
    }

    /// FULL pages that nobody would keep if the receipt came back: those of its prefix that no other
    /// lock covers.
    ///
    /// # Panics
    /// If the receipt is of another cache.
    #[must_use]
    pub fn num_kept_by(&self, receipt: &Receipt) -> u32 {
        let mut pages = 0;
        let mut index = self.locked_end(receipt);
        // Locks cover whole paths: above a node with others' locks there are others' locks.
        while index != NIL && self.arena[index].lock_count == 1 {
            pages += self.arena[index].num_pages();
            index = self.arena[index].parent;
        }
        pages
    }

    /// Gives up the receipt's hold on components besides FULL, once the request has moved so far
    /// past the prefix that it needs them no more.
    ///
    /// # Panics
    /// If the receipt is of another cache.
    pub fn release_window(&mut self, mut receipt: Receipt) -> Receipt {
        if std::mem::take(&mut receipt.keeps_tails) {
            let end = self.locked_end(&receipt);
            self.release_tails(end);
        }
        receipt
    }

    /// Gives a lock back. What nobody locks any more counts as just used.
    ///
    /// # Panics
    /// If the receipt is of another cache.
    pub fn unlock(&mut self, mut receipt: Receipt) {
        let end = self.locked_end(&receipt);
        receipt.is_settled = true;
        self.uses.tick();
        if receipt.keeps_tails {
            self.release_tails(end);
        }
        let mut index = end;
        while index != NIL {
            let node = &mut self.arena[index];
            node.lock_count -= 1;
            let (is_root, parent) = (node.is_root(), node.parent);
            if node.lock_count == 0 {
                if is_root {
                    self.prune_root(index);
                } else {
                    self.num_evictable += node.num_pages();
                    self.uses.touch(index, false, i32::MIN);
                    self.enlist(index);
                }
            }
            index = parent;
        }
        self.num_receipts -= 1;
    }

    fn locked_end(&self, receipt: &Receipt) -> u32 {
        // Its node may exist here, too: the counts of a path that it never locked would fall.
        let is_ours = receipt.cache == self.hasher.identity();
        assert!(is_ours, "the receipt is of another cache");
        let end = self.arena.resolve(receipt.node);
        end.expect("a locked node is neither removed nor cut")
    }

    fn release_tails(&mut self, end: u32) {
        self.unlock_tails(end);
        self.num_tail_receipts -= u32::from(!self.arena[end].is_root());
    }
}
