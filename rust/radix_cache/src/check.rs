//! Recounts everything the cache keeps as a number or a link.

use std::collections::HashMap;

use crate::arena::{Node, NIL, VOID};
use crate::cache::RadixCache;
use crate::error::CacheError;
use crate::page::PageId;
use crate::pool::{PagePool, PageState};

pub(crate) type Checked = Result<(), CacheError>;

pub(crate) fn same(
    what: &'static str,
    recorded: impl Into<u64>,
    recounted: impl Into<u64>,
) -> Checked {
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

pub(crate) fn count(items: impl Iterator) -> u64 {
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
        self.check_pages()?;
        self.check_edges()?;
        self.check_child_index()?;
        self.check_locks()?;
        self.check_eviction_order()?;
        self.check_hashes()?;
        self.check_components()
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = (u32, &Node)> {
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

    fn check_pages(&self) -> Checked {
        let in_tree = self.nodes().flat_map(|(_, node)| node.pages());
        check_pool(&self.pool, in_tree.copied())
    }

    fn check_edges(&self) -> Checked {
        let mut num_children: HashMap<u32, u32> = HashMap::new();
        for (_, node) in self.nodes() {
            *num_children.entry(node.parent).or_default() += 1;
            let parent = &self.arena[node.parent];
            same("root of a node", node.root, parent.root)?;
            let end_page = parent.end_page + node.num_pages();
            same("end page of a node", node.end_page, end_page)?;
            let is_empty = node.pages().is_empty();
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
                let page = self.tokens.page(node.pages()[0]);
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

    /// A list holds the unlocked nodes, each after its children; ranks are of unlocked leaves.
    fn check_eviction_order(&self) -> Checked {
        let is_list = self.order.is_list();
        let mut position: HashMap<u32, u64> = HashMap::new();
        for (node, place) in self.order.iter().zip(0..) {
            let is_repeated = position.insert(node, place).is_some();
            same("a node is listed once", 0_u32, u32::from(is_repeated))?;
            let is_locked = self.arena[node].lock_count > 0;
            same("a locked node in the list", 0_u32, u32::from(is_locked))?;
            let is_listed = self.order.is_listed(node);
            same("a node of the list knows it", 1_u32, u32::from(is_listed))?;
        }
        let is_wanted = |node: &Node| node.lock_count == 0 && (is_list || node.num_children == 0);
        let wanted = self.nodes().filter(|(_, node)| is_wanted(node));
        same("listed nodes", position.len() as u64, count(wanted))?;
        let links_agree = u32::from(self.order.links_agree());
        same("neighbours in the list agree", 1_u32, links_agree)?;
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

/// Who owns what, with the pages that nodes hold given by `in_tree`.
pub(crate) fn check_pool(pool: &PagePool, in_tree: impl Iterator<Item = PageId>) -> Checked {
    let states = pool.states();
    let mut seen = vec![false; states.len()];
    let mut see = |page: PageId, state: PageState| {
        let is_owned = pool.state(page) == Some(state);
        same("a page has its owner's state", 1_u32, u32::from(is_owned))?;
        let is_repeated = std::mem::replace(&mut seen[page as usize], true);
        same("a page has one owner", 0_u32, u32::from(is_repeated))
    };
    for &page in pool.free_pages() {
        see(page, PageState::Free)?;
    }
    let mut num_tree = 0_u64;
    for page in in_tree {
        see(page, PageState::Tree)?;
        num_tree += 1;
    }
    same("pages in the tree", pool.num_tree(), num_tree)?;
    let with = |state| count(states.iter().filter(move |&&found| found == state));
    same("free pages", pool.num_free(), with(PageState::Free))?;
    same("tree pages", pool.num_tree(), with(PageState::Tree))?;
    let is_dummy = states[0] == PageState::Dummy;
    same("page 0 is the dummy page", 1_u32, u32::from(is_dummy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CacheConfig;
    use crate::key::Namespace;
    use crate::lock::Receipt;

    /// Two leaves (nodes 3 and 4) below an inner node (2), the second leaf locked; one page held.
    fn filled() -> (RadixCache, Receipt) {
        let mut cache = RadixCache::new(CacheConfig::new(1, 8)).unwrap();
        let namespace = Namespace::default();
        let mut pages = Vec::new();
        assert!(cache.allocate(5, &mut pages));
        cache.insert(&namespace, &[1, 2], &pages[..2]).unwrap();
        let second = [pages[0], pages[2], pages[3]];
        let inserted = cache.insert(&namespace, &[1, 3, 4], &second).unwrap();
        let receipt = cache.lock(inserted.node).unwrap();
        cache.check_invariants().unwrap();
        (cache, receipt)
    }

    fn leaf(cache: &RadixCache, is_locked: bool) -> u32 {
        let is_wanted = |node: &Node| {
            !node.is_root() && node.num_children == 0 && (node.lock_count > 0) == is_locked
        };
        cache.nodes().find(|(_, node)| is_wanted(node)).unwrap().0
    }

    #[test]
    fn every_kind_of_damage_is_found() {
        type Damage = fn(&mut RadixCache);
        let damages: [(&str, Damage); 16] = [
            ("num_evictable", |cache| cache.num_evictable += 1),
            ("num_receipts", |cache| cache.num_receipts -= 1),
            ("lock lost on a leaf", |cache| {
                let leaf = leaf(cache, true);
                cache.arena[leaf].lock_count = 0;
            }),
            ("lock lost on the path", |cache| {
                let leaf = leaf(cache, true);
                let parent = cache.arena[leaf].parent;
                cache.arena[parent].lock_count = 0;
            }),
            ("num_children", |cache| {
                let leaf = leaf(cache, false);
                cache.arena[leaf].num_children = 1;
            }),
            ("end_page", |cache| {
                let leaf = leaf(cache, false);
                cache.arena[leaf].end_page += 1;
            }),
            ("root", |cache| {
                let leaf = leaf(cache, false);
                cache.arena[leaf].root = VOID;
            }),
            ("page in two nodes", |cache| {
                let (from, to) = (leaf(cache, true), leaf(cache, false));
                cache.arena[to].pages_mut()[0] = cache.arena[from].pages()[1];
            }),
            ("page held and in the tree", |cache| {
                let leaf = leaf(cache, true);
                cache.arena[leaf].pages_mut()[1] = 5;
            }),
            ("child key", |cache| {
                let leaf = leaf(cache, false);
                cache.arena[leaf].child_key ^= 1;
            }),
            ("tokens of a first page", |cache| {
                let leaf = leaf(cache, false);
                let page = cache.arena[leaf].pages()[0];
                cache.tokens.write(&[page], &[77]);
            }),
            ("missing in the child index", |cache| {
                let leaf = leaf(cache, false);
                cache.children.remove(&mut cache.arena, leaf);
            }),
            ("missing in the eviction order", |cache| {
                let leaf = leaf(cache, false);
                cache.delist(leaf);
            }),
            ("locked in the eviction order", |cache| {
                let leaf = leaf(cache, true);
                cache.enlist(leaf);
            }),
            ("node leaked", |cache| {
                let leaf = Node::new(Box::from([5]), VOID, VOID, 1);
                cache.arena.insert(leaf);
            }),
            ("namespace lost", |cache| {
                let root = cache.namespaces.roots().next().unwrap();
                cache.namespaces.remove(root);
            }),
        ];
        for (what, damage) in damages {
            let (mut cache, receipt) = filled();
            damage(&mut cache);
            let found = cache.check_invariants();
            let is_found = matches!(found, Err(CacheError::Inconsistent { .. }));
            assert!(is_found, "{what}: {found:?}");
            receipt.abandon();
        }
    }

    #[test]
    fn a_parent_that_would_be_evicted_before_its_child_is_found() {
        let (mut cache, receipt) = filled();
        let leaf = leaf(&cache, false);
        cache.unlock(receipt);
        cache.check_invariants().unwrap();
        cache.delist(leaf);
        cache.enlist(leaf);
        assert!(cache.check_invariants().is_err());
    }
}
