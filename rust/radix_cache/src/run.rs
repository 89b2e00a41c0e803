//! A short run of page numbers that needs no allocation.

use std::ops::Deref;

use crate::page::PageId;

/// Runs up to this length lie in the node's record: a window of 128 tokens has one or two pages.
const INLINE: usize = 4;

/// A list of pages; derefs to a slice.
#[derive(Debug, Default)]
pub(crate) struct PageRun {
    inline: [PageId; INLINE],
    /// 0 while the pages are on the heap.
    num_inline: u32,
    /// Empty while they are inline.
    heap: Vec<PageId>,
}

impl PageRun {
    /// Puts `pages` before those that are there.
    pub(crate) fn prepend(&mut self, pages: &[PageId]) {
        let len = pages.len() + self.len();
        if len > INLINE {
            let mut heap = Vec::with_capacity(len);
            heap.extend_from_slice(pages);
            heap.extend_from_slice(self);
            *self = Self::on_heap(heap);
            return;
        }
        let num_held = self.len();
        self.inline.copy_within(..num_held, pages.len());
        self.inline[..pages.len()].copy_from_slice(pages);
        self.num_inline = Self::count(len);
    }

    /// Splits into the first `at` pages, which are returned, and the rest, which stays.
    pub(crate) fn take_head(&mut self, at: usize) -> Self {
        let (head, rest) = self.split_at(at);
        let (head, rest) = (Self::from(head), Self::from(rest));
        *self = rest;
        head
    }

    fn on_heap(heap: Vec<PageId>) -> Self {
        Self {
            heap,
            ..Self::default()
        }
    }

    fn count(len: usize) -> u32 {
        u32::try_from(len).expect("at most INLINE")
    }
}

impl From<&[PageId]> for PageRun {
    fn from(pages: &[PageId]) -> Self {
        let mut run = Self::default();
        run.prepend(pages);
        run
    }
}

impl Deref for PageRun {
    type Target = [PageId];

    fn deref(&self) -> &[PageId] {
        if self.heap.is_empty() {
            &self.inline[..self.num_inline as usize]
        } else {
            &self.heap
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_all_lengths_behave_like_lists() {
        for first in 0..9_u32 {
            for second in 0..9_u32 {
                let pages: Vec<PageId> = (0..first + second).collect();
                let mut run = PageRun::from(&pages[first as usize..]);
                run.prepend(&pages[..first as usize]);
                assert_eq!(run[..], pages);
                let at = second as usize;
                let head = run.take_head(at);
                assert_eq!((&head[..], &run[..]), pages.split_at(at));
            }
        }
    }
}
