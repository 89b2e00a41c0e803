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
    /// Keeps the prefix that ends with `node` from being evicted until the receipt comes back.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`] if the node is gone.
    pub fn lock(&mut self, node: NodeHandle) -> Result<Receipt, CacheError> {
        let mut index = self.arena.resolve(node)?;
        while index != NIL {
            if self.arena[index].lock_count == 0 && !self.arena[index].is_root() {
                self.order.remove(&mut self.arena, index);
                self.num_evictable -= self.arena[index].num_pages();
            }
            self.arena[index].lock_count += 1;
            index = self.arena[index].parent;
        }
        self.num_receipts += 1;
        Ok(Receipt {
            node,
            is_settled: false,
        })
    }

    /// Gives a lock back. What nobody locks any more counts as just used.
    ///
    /// # Panics
    /// If the receipt is of another cache.
    pub fn unlock(&mut self, mut receipt: Receipt) {
        receipt.is_settled = true;
        let mut index = self
            .arena
            .resolve(receipt.node)
            .expect("a locked node is never removed");
        while index != NIL {
            let node = &mut self.arena[index];
            node.lock_count -= 1;
            let (is_root, parent) = (node.is_root(), node.parent);
            if node.lock_count == 0 {
                if is_root {
                    self.prune_root(index);
                } else {
                    self.num_evictable += node.num_pages();
                    self.order.push_newest(&mut self.arena, index);
                }
            }
            index = parent;
        }
        self.num_receipts -= 1;
    }
}
