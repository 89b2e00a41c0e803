//! The model's data of components besides FULL: a page number for each few tokens of a prefix.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use dsserve_radix_cache::{Component, PageId};

use super::model::{Model, Place, Prefix};

/// A component with the pages that callers hold.
#[derive(Debug)]
pub struct ModelComponent {
    pub kind: Component,
    /// Tokens before a boundary that must have data.
    pub window: usize,
    pub page_tokens: usize,
    pub num_pages: usize,
    pub held: BTreeSet<PageId>,
}

/// What one FULL page has of a component.
#[derive(Clone, Debug, Default)]
pub struct TailEntry {
    /// Pages by their column in the prefix.
    pub pages: BTreeMap<usize, PageId>,
    pub num_locks: u32,
    touched: u64,
}

/// What an insert did with a tail.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TailOutcome {
    pub num_kept: usize,
    /// (column, own, tree)
    pub replaced: Vec<(usize, PageId, PageId)>,
}

impl Model {
    /// Whether every component has what a hit at the end of this cached prefix needs.
    pub fn allows_end(&self, namespace: usize, tokens: &[u32]) -> bool {
        (0..self.components.len()).all(|at| {
            let component = &self.components[at];
            let start = tokens.len().saturating_sub(component.window);
            let columns = start / component.page_tokens..tokens.len() / component.page_tokens;
            columns
                .into_iter()
                .all(|column| self.tail_page(at, namespace, tokens, column).is_some())
        })
    }

    /// The page of a component at a column of a prefix.
    pub fn tail_page(
        &self,
        at: usize,
        namespace: usize,
        tokens: &[u32],
        column: usize,
    ) -> Option<PageId> {
        let entry = self
            .entries
            .get(&self.prefix_of(at, namespace, tokens, column))?;
        entry.tails[at].pages.get(&column).copied()
    }

    /// Pages that a hit at the end of the prefix needs, as far as they are there without a gap.
    pub fn tail_pages(&self, at: usize, prefix: &Prefix) -> Vec<PageId> {
        let component = &self.components[at];
        let end = prefix.1.len() / component.page_tokens;
        let wanted = component.window.div_ceil(component.page_tokens).min(end);
        let columns = (end - wanted..end).rev();
        let mut pages: Vec<PageId> = columns
            .map_while(|column| self.tail_page(at, prefix.0, &prefix.1, column))
            .collect();
        pages.reverse();
        pages
    }

    /// Gives a tail to the entries of an inserted key.
    pub fn insert_tail(
        &mut self,
        at: usize,
        namespace: usize,
        tokens: &[u32],
        pages: &[PageId],
    ) -> TailOutcome {
        let component = &self.components[at];
        let taken = component.window.div_ceil(component.page_tokens);
        let end = tokens.len() / component.page_tokens;
        let mut outcome = TailOutcome {
            num_kept: pages.len().saturating_sub(taken),
            ..TailOutcome::default()
        };
        for (column, &own) in (end - pages.len()..end).zip(pages).skip(outcome.num_kept) {
            match self.tail_page(at, namespace, tokens, column) {
                Some(tree) if tree == own => {}
                Some(tree) => outcome.replaced.push((column, own, tree)),
                None => {
                    assert!(self.components[at].held.remove(&own));
                    let prefix = self.prefix_of(at, namespace, tokens, column);
                    let entry = self.entries.get_mut(&prefix).unwrap();
                    entry.tails[at].pages.insert(column, own);
                }
            }
        }
        outcome
    }

    pub fn touch_tails(&mut self, namespace: usize, tokens: &[u32]) {
        for at in 0..self.components.len() {
            let start = tokens.len().saturating_sub(self.components[at].window);
            // A node is used as a whole.
            let first = start / self.page_size;
            let mut from = first;
            if first * self.page_size < tokens.len() {
                let here = tokens[..(first + 1) * self.page_size].to_vec();
                from = self.run_start(&(namespace, here));
            }
            let clock = self.clock;
            for prefix in self
                .prefixes_of(&(namespace, tokens.to_vec()))
                .split_off(from)
            {
                self.entries.get_mut(&prefix).unwrap().tails[at].touched = clock;
            }
        }
    }

    pub fn lock_tails(&mut self, place: &Place) {
        self.change_tail_locks(place, |tail, _| tail.num_locks += 1);
    }

    pub fn unlock_tails(&mut self, place: &Place) {
        self.clock += 1;
        let clock = self.clock;
        self.change_tail_locks(place, |tail, _| tail.num_locks -= 1);
        // What is free now counts as just used, node by node.
        for at in 0..self.components.len() {
            let tokens = &place.prefix.1;
            let start = tokens.len().saturating_sub(self.components[at].window);
            let first = start / self.page_size;
            if tokens.is_empty() {
                continue;
            }
            let here = tokens[..(first + 1) * self.page_size].to_vec();
            let from = self.run_start(&(place.prefix.0, here));
            let prefixes = self.prefixes_of(&place.prefix);
            for number in from..prefixes.len() {
                let last = self.run_end(&prefixes, number);
                if self.entries[&prefixes[last]].tails[at].num_locks == 0 {
                    let entry = self.entries.get_mut(&prefixes[number]).unwrap();
                    entry.tails[at].touched = clock;
                }
            }
        }
    }

    /// A node was cut at the end of `prefix`: where the second part is locked and the first is not,
    /// the first can be evicted from now on.
    pub fn split_tails(&mut self, prefix: &Prefix) {
        let Some(end) = self.node_end_below(prefix) else {
            return;
        };
        self.clock += 1;
        let clock = self.clock;
        let start = self.run_start(prefix);
        for at in 0..self.components.len() {
            let is_cut_free = self.entries[&end].tails[at].num_locks > 0
                && self.entries[prefix].tails[at].num_locks == 0;
            if !is_cut_free {
                continue;
            }
            for part in self.prefixes_of(prefix).split_off(start) {
                self.entries.get_mut(&part).unwrap().tails[at].touched = clock;
            }
        }
    }

    /// Evicts data of a component; returns the pages freed.
    pub fn evict_tails(&mut self, at: usize, count: usize) -> usize {
        let before = self.num_tail_pages(at);
        while before - self.num_tail_pages(at) < count {
            let Some(node) = self.first_tail(at) else {
                break;
            };
            let start = self.run_start(&node);
            if self.is_leaf(&node) && self.entries[&node].num_locks == 0 {
                self.shorten(&node, start);
                continue;
            }
            for part in self.prefixes_of(&node).split_off(start) {
                let tail = &mut self.entries.get_mut(&part).unwrap().tails[at];
                assert_eq!(tail.num_locks, 0);
                tail.pages.clear();
            }
        }
        self.drop_unused_roots();
        before - self.num_tail_pages(at)
    }

    pub fn num_tail_pages(&self, at: usize) -> usize {
        let tails = self.entries.values().map(|entry| &entry.tails[at]);
        tails.map(|tail| tail.pages.len()).sum()
    }

    /// Pages in nodes that no receipt keeps.
    pub fn num_evictable_tail(&self, at: usize) -> usize {
        let evictable = self.node_ends().filter(|node| self.is_evictable(at, node));
        evictable.map(|node| self.node_tail_pages(at, node)).sum()
    }

    fn is_evictable(&self, at: usize, node_end: &Prefix) -> bool {
        self.entries[node_end].tails[at].num_locks == 0
    }

    fn node_tail_pages(&self, at: usize, node_end: &Prefix) -> usize {
        let parts = self
            .prefixes_of(node_end)
            .split_off(self.run_start(node_end));
        let pages = parts
            .iter()
            .map(|part| self.entries[part].tails[at].pages.len());
        pages.sum()
    }

    /// Prefixes at which nodes end.
    fn node_ends(&self) -> impl Iterator<Item = &Prefix> {
        let ends = self.entries.iter().filter(|(prefix, entry)| {
            // Nodes end where something ended, and where nothing goes on.
            entry.is_boundary || self.is_leaf(prefix)
        });
        ends.map(|(prefix, _)| prefix)
    }

    fn first_tail(&self, at: usize) -> Option<Prefix> {
        let nodes = self
            .node_ends()
            .filter(|node| self.is_evictable(at, node) && self.node_tail_pages(at, node) > 0);
        let first = nodes.min_by_key(|node| {
            let is_retired = self.retired.contains(&node.0);
            let touched = self.entries[*node].tails[at].touched;
            (Reverse(is_retired), touched, Reverse(node.1.len()))
        });
        first.cloned()
    }

    fn prefix_of(&self, at: usize, namespace: usize, tokens: &[u32], column: usize) -> Prefix {
        let page = column * self.components[at].page_tokens / self.page_size;
        (namespace, tokens[..(page + 1) * self.page_size].to_vec())
    }

    fn change_tail_locks(&mut self, place: &Place, change: impl Fn(&mut TailEntry, u64)) {
        if place.birth == 0 {
            return;
        }
        let clock = self.clock;
        let prefixes = self.prefixes_of(&place.prefix);
        for at in 0..self.components.len() {
            let start = place
                .prefix
                .1
                .len()
                .saturating_sub(self.components[at].window);
            for prefix in prefixes.iter().filter(|prefix| prefix.1.len() > start) {
                change(&mut self.entries.get_mut(prefix).unwrap().tails[at], clock);
            }
        }
    }

    /// Number of the prefix at which the node of prefix `number` ends, on this path.
    fn run_end(&self, prefixes: &[Prefix], number: usize) -> usize {
        let ends = number..prefixes.len();
        let mut ends = ends.filter(|&end| self.entries[&prefixes[end]].is_boundary);
        ends.next().unwrap_or(prefixes.len() - 1)
    }

    /// Where the node goes on to that was just cut at `prefix`; its pages have one child each.
    fn node_end_below(&self, prefix: &Prefix) -> Option<Prefix> {
        let below = self.entries.range(prefix.clone()..).skip(1);
        let mut below =
            below.take_while(|(next, _)| next.0 == prefix.0 && next.1.starts_with(&prefix.1));
        let mut last = None;
        for (next, entry) in &mut below {
            last = Some(next.clone());
            if entry.is_boundary {
                break;
            }
        }
        last
    }
}
