//! Who owns each FULL page: the free list, a caller, or the tree. Page 0 is the dummy page.

use crate::error::CacheError;
use crate::page::{page_count, PageId};

/// Owner of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageState {
    /// Padding target; never handed out.
    Dummy,
    Free,
    /// Handed out by `allocate`, not yet freed or inserted.
    Held,
    /// In exactly one node.
    Tree,
}

/// The pages of one component, with a stack of free ones.
#[derive(Debug)]
pub(crate) struct PagePool {
    /// Taken from the end; kept so that pages come out in ascending runs where possible, which
    /// keeps the tokens of a node contiguous.
    free: Vec<PageId>,
    state: Vec<PageState>,
    num_tree: u32,
}

impl PagePool {
    pub(crate) fn new(num_pages: u32) -> Self {
        let mut state = vec![PageState::Free; num_pages as usize + 1];
        state[0] = PageState::Dummy;
        Self {
            free: (1..=num_pages).rev().collect(),
            state,
            num_tree: 0,
        }
    }

    pub(crate) fn num_pages(&self) -> u32 {
        page_count(self.state.len() - 1)
    }

    pub(crate) fn num_free(&self) -> u32 {
        page_count(self.free.len())
    }

    pub(crate) fn num_tree(&self) -> u32 {
        self.num_tree
    }

    pub(crate) fn state(&self, page: PageId) -> Option<PageState> {
        self.state.get(page as usize).copied()
    }

    pub(crate) fn free_pages(&self) -> &[PageId] {
        &self.free
    }

    pub(crate) fn states(&self) -> &[PageState] {
        &self.state
    }

    /// Appends `count` pages to `out`, or leaves everything as it is and returns false.
    pub(crate) fn allocate(&mut self, count: u32, out: &mut Vec<PageId>) -> bool {
        let Some(rest) = self.free.len().checked_sub(count as usize) else {
            return false;
        };
        out.reserve(count as usize);
        for page in self.free.drain(rest..).rev() {
            self.state[page as usize] = PageState::Held;
            out.push(page);
        }
        true
    }

    /// Caller to free list; on error nothing has changed.
    pub(crate) fn free_held(&mut self, pages: &[PageId]) -> Result<(), CacheError> {
        self.change_owner(pages, PageState::Free)?;
        self.free.extend(pages.iter().rev());
        Ok(())
    }

    /// Caller to tree; on error nothing has changed.
    pub(crate) fn adopt(&mut self, pages: &[PageId]) -> Result<(), CacheError> {
        self.change_owner(pages, PageState::Tree)?;
        self.num_tree += page_count(pages.len());
        Ok(())
    }

    /// Tree back to the caller: takes an [`adopt`](Self::adopt) back.
    pub(crate) fn disown(&mut self, pages: &[PageId]) {
        for &page in pages {
            debug_assert_eq!(self.state[page as usize], PageState::Tree);
            self.state[page as usize] = PageState::Held;
        }
        self.num_tree -= page_count(pages.len());
    }

    /// Tree to free list.
    pub(crate) fn release_tree(&mut self, pages: &[PageId]) {
        for &page in pages.iter().rev() {
            debug_assert_eq!(self.state[page as usize], PageState::Tree);
            self.state[page as usize] = PageState::Free;
            self.free.push(page);
        }
        self.num_tree -= page_count(pages.len());
    }

    fn change_owner(&mut self, pages: &[PageId], owner: PageState) -> Result<(), CacheError> {
        for (done, &page) in pages.iter().enumerate() {
            match self.state.get_mut(page as usize) {
                Some(state) if *state == PageState::Held => *state = owner,
                _ => {
                    for &page in &pages[..done] {
                        self.state[page as usize] = PageState::Held;
                    }
                    return Err(CacheError::PageNotHeld { page });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_is_all_or_nothing_and_starts_at_page_one() {
        let mut pool = PagePool::new(4);
        let mut out = Vec::new();
        assert!(!pool.allocate(5, &mut out));
        assert!(out.is_empty());
        assert!(pool.allocate(4, &mut out));
        assert_eq!(out, [1, 2, 3, 4]);
        assert!(!pool.allocate(1, &mut out));
        assert!(pool.allocate(0, &mut out));
    }

    #[test]
    fn freed_pages_come_out_in_the_same_order() {
        let mut pool = PagePool::new(4);
        let mut out = Vec::new();
        assert!(pool.allocate(4, &mut out));
        pool.free_held(&[2, 3, 4]).unwrap();
        out.clear();
        assert!(pool.allocate(2, &mut out));
        assert_eq!(out, [2, 3]);
    }

    #[test]
    fn wrong_owners_change_nothing() {
        let mut pool = PagePool::new(3);
        let mut out = Vec::new();
        assert!(pool.allocate(2, &mut out));
        for wrong in [[1, 0], [1, 1], [1, 3], [1, 9]] {
            let page = wrong[1];
            assert_eq!(
                pool.free_held(&wrong),
                Err(CacheError::PageNotHeld { page })
            );
            assert_eq!(pool.adopt(&wrong), Err(CacheError::PageNotHeld { page }));
            assert_eq!((pool.num_free(), pool.num_tree()), (1, 0));
            assert_eq!(pool.state(1), Some(PageState::Held));
        }
        pool.adopt(&[1]).unwrap();
        assert_eq!(
            pool.free_held(&[1]),
            Err(CacheError::PageNotHeld { page: 1 })
        );
        pool.release_tree(&[1]);
        assert_eq!((pool.num_free(), pool.num_tree()), (2, 0));
    }
}
