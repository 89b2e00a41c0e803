//! Recounts what the components besides FULL keep, and the hashes that were computed.

use std::collections::HashMap;

use crate::cache::RadixCache;
use crate::check::{check_pool, count, same, Checked};
use crate::component::Trailing;
use crate::hash::page_hashes;

impl RadixCache {
    pub(crate) fn check_components(&self) -> Checked {
        self.trailing.iter().try_for_each(|trailing| {
            let in_tree = self.nodes().flat_map(|(node, _)| trailing.pages(node));
            check_pool(&trailing.pool, in_tree.copied())?;
            self.check_tail_nodes(trailing)?;
            self.check_tail_locks(trailing)
        })
    }

    /// Data fits its node; what nobody keeps is counted and listed.
    fn check_tail_nodes(&self, trailing: &Trailing) -> Checked {
        let mut num_evictable = 0;
        let mut num_listed = 0_u64;
        for (index, node) in self.arena.iter() {
            let num_pages = trailing.pages(index).len() as u64;
            let room = u64::from(trailing.pages_for(node.num_pages()));
            same(
                "data beyond its node",
                0_u64,
                num_pages.saturating_sub(room),
            )?;
            let is_evictable = num_pages > 0 && trailing.lock_count(index) == 0;
            if is_evictable {
                num_evictable += num_pages;
                num_listed += 1;
            }
            let is_listed = trailing.order.is_listed(index);
            same(
                "unlocked data is listed",
                u32::from(is_evictable),
                u32::from(is_listed),
            )?;
        }
        same("evictable data", trailing.num_evictable, num_evictable)?;
        same("listed data", count(trailing.order.iter()), num_listed)?;
        let links_agree = u32::from(trailing.order.links_agree());
        same("neighbours in a component's list agree", 1_u32, links_agree)
    }

    /// Locks on a node are those that come up from its children and those of receipts on it; each
    /// begins in one node.
    fn check_tail_locks(&self, trailing: &Trailing) -> Checked {
        let mut from_below: HashMap<u32, u32> = HashMap::new();
        let mut num_begun = 0_u64;
        for (index, node) in self.nodes() {
            let Some(tail) = trailing.tail(index) else {
                continue;
            };
            let locks = u64::from(tail.lock_count);
            same(
                "locks beyond FULL's",
                locks.min(node.lock_count.into()),
                locks,
            )?;
            let begun = tail.num_begun();
            same("marks without locks", begun.min(tail.lock_count), begun)?;
            num_begun += u64::from(begun);
            *from_below.entry(node.parent).or_default() += tail.lock_count - begun;
            let page_size = self.config.page_size;
            let range = node.start_page() * page_size..node.end_page * page_size;
            for (mark, _) in &tail.marks {
                same("a mark in its node", 1_u32, u32::from(range.contains(mark)))?;
            }
        }
        same("receipts with tails", self.num_tail_receipts, num_begun)?;
        for (index, node) in self.arena.iter() {
            let below = from_below.get(&index).copied().unwrap_or(0);
            let here = if node.is_root() {
                0
            } else {
                trailing.lock_count(index)
            };
            same("locks from below are counted", below.min(here), below)?;
        }
        Ok(())
    }

    /// Kept hashes are those of the tokens.
    pub(crate) fn check_hashes(&self) -> Checked {
        if self.hashes.is_unused() {
            return Ok(());
        }
        for (index, node) in self.nodes().filter(|(_, node)| node.num_children == 0) {
            let path = self.path_to(index);
            let pages: Vec<u32> = path
                .iter()
                .flat_map(|&node| self.arena[node].pages())
                .copied()
                .collect();
            if self.hashes.of(pages[0]) == [0; 32] {
                continue;
            }
            let tokens = pages.iter().flat_map(|&page| self.tokens.page(page));
            let tokens: Vec<u32> = tokens.copied().collect();
            let name = self.namespaces.name(node.root);
            let name = name.map(|name| page_hashes(name, &tokens, self.config.page_size));
            let expected = name.unwrap_or_default();
            for (page, expected) in pages.iter().zip(expected) {
                let found = self.hashes.of(*page);
                let is_right = found == expected || found == [0; 32];
                same("a kept hash", 1_u32, u32::from(is_right))?;
            }
        }
        Ok(())
    }
}
