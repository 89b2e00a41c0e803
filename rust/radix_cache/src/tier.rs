//! Which cached pages also lie in host memory or in an external store.
//!
//! What is kept here is a note for routers and for whoever evicts; the copies themselves are made
//! and found by others. A note goes with its page: what leaves the device leaves this index.

use crate::arena::NodeHandle;
use crate::cache::RadixCache;
use crate::error::CacheError;
use crate::event::Medium;
use crate::page::PageId;

/// Where the pages of a node lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Residence {
    /// In device memory.
    pub device: bool,
    /// In host memory.
    pub host: bool,
    /// In an external store.
    pub storage: bool,
}

/// Notes by page id, as hashes are kept: a split moves nothing. Empty until the first copy.
#[derive(Debug, Default)]
pub(crate) struct CopyStore {
    by_page: Vec<u8>,
}

/// `None` for the device: a page in the tree always lies there.
fn bit(medium: Medium) -> Option<u8> {
    match medium {
        Medium::Gpu => None,
        Medium::Cpu => Some(1),
        Medium::Storage => Some(2),
    }
}

impl CopyStore {
    pub(crate) fn has(&self, page: PageId, medium: Medium) -> bool {
        let noted = self.by_page.get(page as usize).copied().unwrap_or(0);
        bit(medium).is_none_or(|bit| noted & bit != 0)
    }

    /// The page holds other tokens now.
    pub(crate) fn forget(&mut self, pages: &[PageId]) {
        if self.by_page.is_empty() {
            return;
        }
        for &page in pages {
            self.by_page[page as usize] = 0;
        }
    }

    fn note(&mut self, page: PageId, bit: u8, is_stored: bool) {
        let noted = &mut self.by_page[page as usize];
        if is_stored {
            *noted |= bit;
        } else {
            *noted &= !bit;
        }
    }
}

impl RadixCache {
    /// Where the pages of a node lie (those of its prefix lie at least on the device).
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`].
    pub fn residence(&self, node: NodeHandle) -> Result<Residence, CacheError> {
        let pages = self.arena[self.arena.resolve(node)?].pages();
        let has =
            |medium| !pages.is_empty() && pages.iter().all(|&page| self.copies.has(page, medium));
        Ok(Residence {
            device: !pages.is_empty(),
            host: has(Medium::Cpu),
            storage: has(Medium::Storage),
        })
    }

    /// Notes that the pages of a node were copied to a medium, or that the copy is gone.
    ///
    /// Keeps the note across splits, and announces it in the KV events. Returns whether anything
    /// changed; [`Medium::Gpu`] changes nothing, the tree itself says what lies there.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`].
    pub fn note_copy(
        &mut self,
        node: NodeHandle,
        medium: Medium,
        is_stored: bool,
    ) -> Result<bool, CacheError> {
        let node = self.arena.resolve(node)?;
        let Some(bit) = bit(medium) else {
            return Ok(false);
        };
        // All pages of a node are copied together, and a split keeps it so.
        let first = self.arena[node].pages().first();
        if first.is_none_or(|&page| self.copies.has(page, medium) == is_stored) {
            return Ok(false);
        }
        if self.copies.by_page.is_empty() {
            self.copies.by_page = vec![0; self.config.num_pages as usize + 1];
        }
        for &page in self.arena[node].pages() {
            self.copies.note(page, bit, is_stored);
        }
        self.record_copy(node, medium, is_stored);
        Ok(true)
    }
}
