//! Data that only the end of a prefix needs: which nodes have it, and which boundaries it allows.
//!
//! Each node may have data on its last pages, as one run up to its end: an insert brings data for
//! the end of its key, a split cuts the run in two such runs, and eviction takes all of it. So the
//! state of a component lies beside the tree, one list of pages a node, and a tree without further
//! components has none of it. A node without data is a tombstone.

use crate::arena::Arena;
use crate::config::{Component, ComponentConfig, Retention};
use crate::order::EvictionOrder;
use crate::page::{page_count, PageId};
use crate::pool::PagePool;
use crate::run::PageRun;

/// What a node has of a component.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    /// Pages of the last tokens of the node, in order.
    pub(crate) pages: PageRun,
    /// Receipts that keep data here (if there is any).
    pub(crate) lock_count: u32,
    /// Where the locks that do not go on into the parent begin: (token, receipts).
    pub(crate) marks: Vec<(u32, u32)>,
}

impl Tail {
    /// A lock begins at `token`.
    pub(crate) fn add_mark(&mut self, token: u32) {
        match self.marks.iter_mut().find(|(at, _)| *at == token) {
            Some((_, receipts)) => *receipts += 1,
            None => self.marks.push((token, 1)),
        }
    }

    pub(crate) fn remove_mark(&mut self, token: u32) {
        let at = self.marks.iter().position(|&(at, _)| at == token);
        let at = at.expect("a receipt has a mark where it begins");
        self.marks[at].1 -= 1;
        if self.marks[at].1 == 0 {
            self.marks.swap_remove(at);
        }
    }

    /// Locks that begin in this node.
    pub(crate) fn num_begun(&self) -> u32 {
        self.marks.iter().map(|&(_, receipts)| receipts).sum()
    }
}

/// One component besides FULL, with the pages that the tree and the callers have of it.
#[derive(Debug)]
pub(crate) struct Trailing {
    pub(crate) kind: Component,
    /// Tokens before a boundary that must have data.
    pub(crate) window: u32,
    /// Tokens a page covers.
    pub(crate) page_tokens: u32,
    /// Pages of it that cover a FULL page.
    pages_per_page: u32,
    pub(crate) pool: PagePool,
    /// By node index.
    tails: Vec<Tail>,
    /// Nodes with data that no receipt keeps.
    pub(crate) order: EvictionOrder,
    /// Pages in such nodes.
    pub(crate) num_evictable: u32,
    /// Pages that an insert is about to give to the tree.
    pub(crate) scratch: Vec<PageId>,
}

impl Trailing {
    /// `None` for components that the tree does not hold. With room for `capacity` nodes.
    pub(crate) fn new(
        kind: Component,
        config: ComponentConfig,
        page_size: u32,
        capacity: usize,
    ) -> Option<Self> {
        let window = match config.retention {
            Retention::Path => u32::MAX,
            Retention::Trailing(window) => window,
            Retention::None { .. } => return None,
        };
        Some(Self {
            kind,
            window,
            page_tokens: config.page_tokens,
            pages_per_page: page_size / config.page_tokens,
            pool: PagePool::new(config.num_pages),
            tails: Vec::with_capacity(capacity),
            order: EvictionOrder::new(config.policy, capacity),
            num_evictable: 0,
            scratch: Vec::new(),
        })
    }

    /// Pages that cover the last tokens which a boundary needs.
    pub(crate) fn window_pages(&self) -> u32 {
        self.window.div_ceil(self.page_tokens)
    }

    /// Pages of this component that cover `num_pages` FULL pages.
    pub(crate) fn pages_for(&self, num_pages: u32) -> u32 {
        num_pages * self.pages_per_page
    }

    pub(crate) fn tail(&self, node: u32) -> Option<&Tail> {
        self.tails.get(node as usize)
    }

    pub(crate) fn pages(&self, node: u32) -> &[PageId] {
        self.tail(node).map_or(&[], |tail| &tail.pages)
    }

    pub(crate) fn lock_count(&self, node: u32) -> u32 {
        self.tail(node).map_or(0, |tail| tail.lock_count)
    }

    pub(crate) fn tail_mut(&mut self, node: u32) -> &mut Tail {
        let at = node as usize;
        if self.tails.len() <= at {
            self.tails.resize_with(at + 1, Tail::default);
        }
        &mut self.tails[at]
    }

    /// Tokens that `num_pages` pages cover.
    pub(crate) fn tokens_of(&self, num_pages: usize) -> u32 {
        page_count(num_pages) * self.page_tokens
    }

    /// The last boundary at or before token `end` of `node` that this component allows, and the
    /// node it lies in or at the end of. Each node is looked at once.
    pub(crate) fn last_boundary(
        &self,
        arena: &Arena,
        page_size: u32,
        mut node: u32,
        mut end: u32,
    ) -> (u32, u32) {
        let mut at = node;
        let mut covered_from = end;
        loop {
            let here = &arena[at];
            if here.is_root() {
                return (node, end);
            }
            let (node_start, node_end) = (here.start_page() * page_size, here.end_page * page_size);
            let data_start = node_end - self.tokens_of(self.pages(at).len());
            let has_data = data_start < covered_from;
            if has_data && data_start <= end.saturating_sub(self.window) {
                return (node, end);
            }
            at = here.parent;
            covered_from = node_start;
            if !has_data || data_start > node_start {
                // A gap closer to `end` than the window: nothing behind it can end here or before.
                (node, end) = (at, node_start);
            }
        }
    }

    /// Whether this component allows a hit to end at the end of `node`; looks at no node beyond the
    /// first gap.
    pub(crate) fn allows_end(&self, arena: &Arena, page_size: u32, node: u32) -> bool {
        let end = arena[node].end_page * page_size;
        let mut at = node;
        loop {
            let here = &arena[at];
            if here.is_root() {
                return true;
            }
            let num_pages = self.pages(at).len();
            let data_start = here.end_page * page_size - self.tokens_of(num_pages);
            if num_pages == 0 || data_start > here.start_page() * page_size {
                return num_pages > 0 && data_start <= end.saturating_sub(self.window);
            }
            if data_start <= end.saturating_sub(self.window) {
                return true;
            }
            at = here.parent;
        }
    }

    /// First token that a lock on a prefix of `end` tokens keeps.
    pub(crate) fn lock_start(&self, end: u32) -> u32 {
        end.saturating_sub(self.window)
    }

    /// Moves the head's share of a tail to `first`, the new node that ends at token `split_at`.
    /// Returns the pages that moved.
    pub(crate) fn split(&mut self, second: u32, first: u32, second_end: u32, split_at: u32) -> u32 {
        if self.tail(second).is_none() {
            return 0;
        }
        let kept = ((second_end - split_at) / self.page_tokens) as usize;
        let whole = self.tail_mut(second);
        let num_moved = whole.pages.len().saturating_sub(kept);
        let moved = whole.pages.take_head(num_moved);
        let (before, after) = whole.marks.iter().partition(|&&(at, _)| at < split_at);
        whole.marks = after;
        // Locks that begin in the second part do not reach the first.
        let lock_count = whole.lock_count - whole.num_begun();
        if num_moved > 0 || lock_count > 0 {
            *self.tail_mut(first) = Tail {
                pages: moved,
                lock_count,
                marks: before,
            };
        }
        page_count(num_moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Node, NIL, VOID};

    /// A root, a node of 4 pages and one of 2 below it, with page size 4 and pages of 2 tokens.
    fn chain(window: u32, first: u32, second: u32) -> (Arena, Trailing, [u32; 3]) {
        let mut arena = Arena::new(0);
        let root = arena.insert(Node::new(Box::default(), NIL, VOID, 0));
        let parent = arena.insert(Node::new(Box::from([1, 2, 3, 4]), root, root, 4));
        let child = arena.insert(Node::new(Box::from([5, 6]), parent, root, 6));
        let config = ComponentConfig::new(Retention::Trailing(window), 2, 99);
        let mut trailing = Trailing::new(Component::Window, config, 4, 0).unwrap();
        let pages: Vec<PageId> = (0..first.max(second)).collect();
        trailing.tail_mut(parent).pages = PageRun::from(&pages[..first as usize]);
        trailing.tail_mut(child).pages = PageRun::from(&pages[..second as usize]);
        (arena, trailing, [root, parent, child])
    }

    #[test]
    fn a_boundary_needs_data_on_all_of_its_window() {
        // (window, pages of data on parent and child, wanted end, allowed end)
        let cases = [
            (2, 8, 4, 24, 24),
            (2, 0, 1, 24, 24),
            (2, 0, 1, 20, 0), // nothing before token 22
            (3, 0, 2, 24, 24),
            (4, 0, 1, 24, 0),
            (4, 2, 1, 24, 16), // the parent's end still has its window
            (8, 0, 4, 24, 24), // 16..24
            (9, 1, 4, 24, 24), // 14..24 covers 15..24
            (11, 1, 4, 24, 0), // 13 is missing, and the parent's end lacks more
            (16, 8, 4, 24, 24),
            (16, 8, 0, 24, 16),
            (16, 8, 4, 12, 12), // a prefix shorter than the window needs all of it
            (16, 6, 4, 12, 0),  // tokens 0..4 are missing
            (4, 6, 4, 12, 12),  // 8..12
            (4, 6, 4, 8, 8),    // 4..8
            (4, 5, 4, 8, 0),    // 4..6 is missing
            (u32::MAX, 8, 4, 24, 24),
            (u32::MAX, 7, 4, 24, 0),
        ];
        for (window, first, second, wanted, allowed) in cases {
            let (arena, trailing, nodes) = chain(window, first, second);
            let node = nodes[if wanted > 16 { 2 } else { 1 }];
            let found = trailing.last_boundary(&arena, 4, node, wanted);
            let place = nodes[match allowed {
                0 => 0,
                1..=16 => 1,
                _ => 2,
            }];
            let case = (window, first, second, wanted);
            assert_eq!(found, (place, allowed), "{case:?}");
            if arena[node].end_page * 4 == wanted {
                let allows = trailing.allows_end(&arena, 4, node);
                assert_eq!(allows, wanted == allowed, "{case:?}");
            }
        }
    }

    #[test]
    fn a_split_divides_data_locks_and_marks_by_place() {
        let (_, mut trailing, [_, parent, _]) = chain(4, 6, 0);
        let tail = trailing.tail_mut(parent);
        tail.lock_count = 5;
        for mark in [5, 5, 12, 9] {
            tail.add_mark(mark);
        }
        // The fifth lock goes on into the parent's parent.
        assert_eq!(trailing.split(parent, 9, 16, 8), 2);
        let (first, second) = (trailing.tail(9).unwrap(), trailing.tail(parent).unwrap());
        assert_eq!(
            (&first.pages[..], &second.pages[..]),
            (&[0, 1][..], &[2, 3, 4, 5][..])
        );
        assert_eq!((first.lock_count, second.lock_count), (3, 5));
        assert_eq!((first.num_begun(), second.num_begun()), (2, 2));
        trailing.tail_mut(9).remove_mark(5);
        assert_eq!(trailing.tail(9).unwrap().marks, [(5, 1)]);
    }
}
