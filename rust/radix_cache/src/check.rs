//! Recounts everything the cache keeps as a number or a link.

use std::collections::HashMap;

use crate::arena::{Node, NIL, VOID};
use crate::cache::RadixCache;
use crate::error::CacheError;
use crate::pool::PageState;

type Checked = Result<(), CacheError>;

fn same(what: &'static str, recorded: impl Into<u64>, recounted: impl Into<u64>) -> Checked {
    let (recorded, recounted) = (recorded.into(), recounted.into());
    if recorded == recounted {
        return Ok(());
    }
    Err(CacheError::Inconsistent {
        what,
        recorded,
        recounted,
    })
}

fn count(items: impl Iterator) -> u64 {
    items.fold(0, |sum, _| sum + 1)
}

impl RadixCache {
    /// Recounts the whole cache (owners of pages, counters, locks, links, alignment) and compares.
    /// Linear in nodes and pages; meant for tests and for a look at a suspicious server.
    ///
    /// # Errors
    /// [`CacheError::Inconsistent`] with the first quantity that differs.
    pub fn check_invariants(&self) -> Result<(), CacheError> {
        self.check_slots()?;
        self.check_free_pages()?;
        self.check_tree_pages()?;
        self.check_edges()?;
        self.check_child_index()?;
        self.check_locks()?;
        self.check_eviction_order()
    }

    fn nodes(&self) -> impl Iterator<Item = (u32, &Node)> {
        self.arena.iter().filter(|(_, node)| !node.is_root())
    }

    fn check_slots(&self) -> Checked {
        let in_use = self.arena.num_slots() - self.arena.num_vacant();
        same("nodes in use", in_use as u64, count(self.arena.iter()))?;
        let roots = self.arena.iter().filter(|(_, node)| node.is_root());
        let num_roots = self.namespaces.len() as u64 + 1;
        same("namespaces with VOID", num_roots, count(roots))?;
        for root in self.namespaces.roots() {
            let node = &self.arena[root];
            same(
                "a namespace leads to a root",
                1_u32,
                u32::from(node.is_root()),
            )?;
            same("root of a root", node.root, root)?;
            let is_wanted = node.num_children > 0 || node.lock_count > 0;
            same("a root holds or is held", 1_u32, u32::from(is_wanted))?;
        }
        same("children of VOID", self.arena[VOID].num_children, 0_u32)
    }

    fn check_free_pages(&self) -> Checked {
        let mut seen = vec![false; self.pool.states().len()];
        for &page in self.pool.free_pages() {
            let is_free = self.pool.state(page) == Some(PageState::Free);
            same("a listed page is free", 1_u32, u32::from(is_free))?;
            let is_repeated = std::mem::replace(&mut seen[page as usize], true);
            same("a free page is listed once", 0_u32, u32::from(is_repeated))?;
        }
        let states = self.pool.states();
        let num_free = states.iter().filter(|&&state| state == PageState::Free);
        same("free pages", self.num_free(), count(num_free))?;
        let num_held = states.iter().filter(|&&state| state == PageState::Held);
        same("held pages", self.num_held(), count(num_held))?;
        let is_dummy = states[0] == PageState::Dummy;
        same("page 0 is the dummy page", 1_u32, u32::from(is_dummy))
    }

    fn check_tree_pages(&self) -> Checked {
        let mut seen = vec![false; self.pool.states().len()];
        for &page in self.nodes().flat_map(|(_, node)| &node.pages) {
            let is_tree = self.pool.state(page) == Some(PageState::Tree);
            same("a page of a node is the tree's", 1_u32, u32::from(is_tree))?;
            let is_repeated = std::mem::replace(&mut seen[page as usize], true);
            same("a page is in one node", 0_u32, u32::from(is_repeated))?;
        }
        let tree_pages = seen.iter().filter(|&&is_seen| is_seen);
        same("pages in the tree", self.pool.num_tree(), count(tree_pages))
    }

    fn check_edges(&self) -> Checked {
        let mut num_children: HashMap<u32, u32> = HashMap::new();
        for (_, node) in self.nodes() {
            *num_children.entry(node.parent).or_default() += 1;
            let parent = &self.arena[node.parent];
            same("root of a node", node.root, parent.root)?;
            let end_page = parent.end_page + node.num_pages();
            same("end page of a node", node.end_page, end_page)?;
            let is_empty = node.pages.is_empty();
            same("a node without pages", 0_u32, u32::from(is_empty))?;
        }
        for (index, node) in self.arena.iter() {
            let recounted = num_children.get(&index).copied().unwrap_or(0);
            same("children of a node", node.num_children, recounted)?;
        }
        Ok(())
    }

    fn check_child_index(&self) -> Checked {
        let mut num_indexed = 0_u64;
        for (key, head) in self.children.iter() {
            let mut first_pages = Vec::new();
            let mut index = head;
            while index != NIL {
                let node = &self.arena[index];
                let page = self.tokens.page(node.pages[0]);
                same("key of a node in its chain", key, node.child_key)?;
                let recounted = self.hasher.child_key(node.parent, page);
                same("key of a node", node.child_key, recounted)?;
                let is_repeated = first_pages.contains(&(node.parent, page));
                same(
                    "siblings with one first page",
                    0_u32,
                    u32::from(is_repeated),
                )?;
                first_pages.push((node.parent, page));
                index = node.next_same_key;
                num_indexed += 1;
            }
        }
        same("nodes in the child index", num_indexed, count(self.nodes()))
    }

    /// Locks on a node are those on its children and its own; own locks add up to the receipts.
    fn check_locks(&self) -> Checked {
        let mut below: HashMap<u32, u32> = HashMap::new();
        for (_, node) in self.nodes() {
            *below.entry(node.parent).or_default() += node.lock_count;
        }
        let mut num_receipts = 0_u64;
        for (index, node) in self.arena.iter() {
            let below = below.get(&index).copied().unwrap_or(0);
            let covered = node.lock_count.min(below);
            same("locks below a node are counted on it", below, covered)?;
            num_receipts += u64::from(node.lock_count - below);
        }
        same("receipts", self.num_receipts, num_receipts)?;
        let unlocked = self.nodes().filter(|(_, node)| node.lock_count == 0);
        let num_evictable: u64 = unlocked.map(|(_, node)| u64::from(node.num_pages())).sum();
        same("evictable pages", self.num_evictable, num_evictable)
    }

    /// The list holds the unlocked nodes, each after its children.
    fn check_eviction_order(&self) -> Checked {
        let mut position: HashMap<u32, u64> = HashMap::new();
        let mut previous = NIL;
        for (node, place) in self.order.iter(&self.arena).zip(0..) {
            same("older neighbour", self.arena[node].older, previous)?;
            let is_repeated = position.insert(node, place).is_some();
            same("a node is listed once", 0_u32, u32::from(is_repeated))?;
            let is_locked = self.arena[node].lock_count > 0;
            same("a locked node in the list", 0_u32, u32::from(is_locked))?;
            previous = node;
        }
        let unlocked = self.nodes().filter(|(_, node)| node.lock_count == 0);
        same("listed nodes", position.len() as u64, count(unlocked))?;
        for (node, place) in &position {
            if let Some(parent_place) = position.get(&self.arena[*node].parent) {
                let is_before = place < parent_place;
                same(
                    "a child goes before its parent",
                    1_u32,
                    u32::from(is_before),
                )?;
            }
        }
        Ok(())
    }
}
