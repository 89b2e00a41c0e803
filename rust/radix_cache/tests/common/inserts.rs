//! Inserts of the harness: page table rows, tails, and what comes back.

use dsserve_radix_cache::{
    CacheError, Component, InsertOptions, Inserted, NodeHandle, PageId, Replaced, TailPages,
};

use super::harness::{len, number, Harness};
use super::model::{Cause, Place};
use super::model_tails::TailOutcome;

impl Harness {
    /// A page table row: the tree's pages where `keep` says so, new ones elsewhere.
    fn row(&mut self, namespace: usize, tokens: &[u32], keep: bool) -> Option<Vec<PageId>> {
        let mut row = Vec::new();
        let num_pages = tokens.len() / self.model.page_size;
        if keep {
            row = self.model.pages(namespace, tokens);
        }
        let wanted = num_pages - row.len();
        let mut own: Vec<PageId> = self.model.held.iter().copied().take(wanted).collect();
        let mut new = Vec::new();
        let is_enough = wanted - own.len() <= self.model.num_free();
        assert_eq!(
            self.cache.allocate(number(wanted - own.len()), &mut new),
            is_enough
        );
        for &page in &new {
            assert!((1..=self.model.num_pages).contains(&len(page)));
            assert!(
                self.model.owners().all(|owned| owned != page),
                "page {page} owned twice"
            );
            self.model.held.insert(page);
        }
        own.extend(new);
        row.extend(own);
        is_enough.then_some(row)
    }

    /// Pages of a component for the end of a key.
    fn tail_row(
        &mut self,
        at: usize,
        (namespace, tokens): (usize, &[u32]),
        (keep, tail): (bool, u8),
    ) -> Vec<PageId> {
        let component = &self.model.components[at];
        let end = tokens.len() / component.page_tokens;
        let wanted = if tail == 255 {
            component.window.div_ceil(component.page_tokens).min(end)
        } else {
            usize::from(tail) % (end + 1)
        };
        let kind = component.kind;
        let mut own = component.held.clone().into_iter();
        let mut row = Vec::new();
        for column in (end - wanted..end).rev() {
            let tree = self.model.tail_page(at, namespace, tokens, column);
            if let Some(page) = tree.filter(|_| keep).or_else(|| own.next()) {
                row.push(page);
                continue;
            }
            let mut new = Vec::new();
            let is_there = self.cache.allocate_component(kind, 1, &mut new).unwrap();
            if !is_there {
                break;
            }
            assert!(self.model.components[at].held.insert(new[0]));
            row.push(new[0]);
        }
        row.reverse();
        row
    }

    pub(super) fn insert(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        (keep, tail): (bool, u8),
        priority: i32,
        at: Option<&(NodeHandle, Place)>,
    ) {
        let Some(mut row) = self.row(namespace, tokens, keep) else {
            return;
        };
        let tails: Vec<Vec<PageId>> = (0..self.model.components.len())
            .map(|at| self.tail_row(at, (namespace, tokens), (keep, tail)))
            .collect();
        let kinds = Component::OPTIONAL.iter();
        let brought: Vec<TailPages<'_>> = tails
            .iter()
            .zip(kinds)
            .map(|(pages, &component)| TailPages { component, pages })
            .collect();
        let tree = self.model.pages(namespace, tokens);
        let name = &self.namespaces[namespace];
        let mut options = InsertOptions::default()
            .with_tails(&brought)
            .with_priority(priority);
        let mut skipped = 0;
        if let Some((handle, place)) = at {
            options = options.with_from(*handle);
            if !self.model.is_live(place) {
                let result = self.cache.insert_with(name, tokens, &row, options);
                assert!(matches!(result, Err(CacheError::StaleHandle { .. })));
                return;
            }
            // What comes before the node is not looked at.
            skipped = place.prefix.1.len() / self.model.page_size;
            row[..skipped].fill(0);
        }
        let result = self.cache.insert_with(name, tokens, &row, options);
        let Inserted {
            node,
            reused_len,
            replaced,
            tails: outcomes,
            ..
        } = result.unwrap();
        let expected: Vec<Replaced> = (skipped..tree.len())
            .filter(|&column| row[column] != tree[column])
            .map(|column| Replaced {
                page_index: number(column),
                own: row[column],
                tree: tree[column],
            })
            .collect();
        assert_eq!(replaced, expected, "exactly the duplicates");
        assert_eq!(len(reused_len), tree.len() * self.model.page_size);
        self.model.insert(namespace, tokens, &row, tree.len());
        let mut outcomes = outcomes.into_iter().peekable();
        for ((at, pages), component) in tails.iter().enumerate().zip(Component::OPTIONAL) {
            let expected = self.model.insert_tail(at, namespace, tokens, pages);
            let outcome = outcomes.next_if(|outcome| outcome.component == component);
            let found = outcome.map(|outcome| {
                let replaced = outcome.replaced.iter();
                let replaced = replaced.map(|page| (len(page.page_index), page.own, page.tree));
                TailOutcome {
                    num_kept: len(outcome.num_kept),
                    replaced: replaced.collect(),
                }
            });
            assert_eq!(found.unwrap_or_default(), expected, "what stays of a tail");
        }
        assert!(outcomes.next().is_none());
        let cause = Cause::Insert(priority);
        let place = self.model.touch(namespace, tokens, row.len(), cause);
        self.remember(node, place);
    }

    pub(super) fn insert_at(&mut self, place: usize, key: &[u8], how: (bool, u8)) {
        if self.places.is_empty() {
            return;
        }
        let (handle, place) = self.places[place % self.places.len()].clone();
        let namespace = place.prefix.0;
        let mut tokens = place.prefix.1.clone();
        tokens.extend(self.tokens(key));
        self.insert(namespace, &tokens, how, i32::MIN, Some(&(handle, place)));
    }
}
