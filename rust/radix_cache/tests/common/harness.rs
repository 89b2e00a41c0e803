//! Runs the same operations on the cache and on the flat model, and compares after each.

use dsserve_radix_cache::{
    page_hashes, CacheError, Inserted, Namespace, NodeHandle, PageId, RadixCache, Receipt, Replaced,
};

use super::model::{Model, Place};
use super::{namespaces, new_cache};

/// One operation; indices are taken modulo what exists.
#[derive(Clone, Debug)]
pub enum Op {
    Match {
        namespace: usize,
        key: Vec<u8>,
        extra: usize,
    },
    /// `keep`: use the tree's pages where there are some, as after a match.
    Insert {
        namespace: usize,
        key: Vec<u8>,
        keep: bool,
    },
    InsertAt {
        place: usize,
        key: Vec<u8>,
        keep: bool,
    },
    Lock {
        place: usize,
    },
    Unlock {
        receipt: usize,
    },
    Evict {
        count: u32,
    },
    Free {
        count: usize,
    },
    Flush,
    /// Calls that must be refused and change nothing.
    Wrong {
        page: PageId,
    },
}

pub struct Harness {
    pub cache: RadixCache,
    pub model: Model,
    namespaces: Vec<Namespace>,
    places: Vec<(NodeHandle, Place)>,
    receipts: Vec<(Receipt, Place)>,
}

fn len(value: u32) -> usize {
    value as usize
}

fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

impl Harness {
    pub fn new(page_size: u32, num_pages: u32) -> Self {
        Self {
            cache: new_cache(page_size, num_pages),
            model: Model::new(len(page_size), len(num_pages)),
            namespaces: namespaces(),
            places: Vec::new(),
            receipts: Vec::new(),
        }
    }

    pub fn run(&mut self, op: &Op) {
        match op {
            Op::Match {
                namespace,
                key,
                extra,
            } => self.match_prefix(*namespace, key, *extra),
            Op::Insert {
                namespace,
                key,
                keep,
            } => {
                let namespace = namespace % self.namespaces.len();
                self.insert(namespace, &self.tokens(key), *keep, None);
            }
            Op::InsertAt { place, key, keep } => self.insert_at(*place, key, *keep),
            Op::Lock { place } => self.lock(*place),
            Op::Unlock { receipt } => self.unlock(*receipt),
            Op::Evict { count } => {
                let freed = self.model.evict(len(*count)).len();
                assert_eq!(len(self.cache.evict(*count)), freed, "pages evicted");
            }
            Op::Free { count } => {
                let pages: Vec<PageId> = self.model.held.iter().copied().take(*count).collect();
                self.cache.free(&pages);
                self.model.held.retain(|page| !pages.contains(page));
            }
            Op::Flush => self.flush(),
            Op::Wrong { page } => self.refuse(*page),
        }
        self.compare_counts();
    }

    /// Gives all receipts back and empties the cache: nothing may be left over.
    pub fn finish(mut self) {
        while !self.receipts.is_empty() {
            self.unlock(0);
        }
        self.flush();
        let held: Vec<PageId> = self.model.held.iter().copied().collect();
        self.cache.free(&held);
        assert_eq!(
            self.cache.num_free(),
            self.cache.num_pages(),
            "pages leaked"
        );
        self.cache.check_invariants().unwrap();
    }

    /// Every prefix of the model is found, and nothing beyond; hashes do not see the splits.
    pub fn compare_all(&self) {
        self.cache.check_invariants().unwrap();
        for (namespace, tokens) in self.model.entries.keys() {
            let name = &self.namespaces[*namespace];
            let mut longer = tokens.clone();
            assert_eq!(len(self.cache.match_dry_run(name, tokens)), tokens.len());
            longer.extend(vec![9; self.model.page_size]);
            assert_eq!(len(self.cache.match_dry_run(name, &longer)), tokens.len());
        }
        for (handle, place) in &self.places {
            if self.model.is_live(place) {
                let (namespace, tokens) = &place.prefix;
                let name = &self.namespaces[*namespace];
                let found = self.cache.prefix_tokens(*handle).unwrap();
                assert_eq!(&found, tokens, "a handle keeps its prefix");
                assert_eq!(len(self.cache.prefix_len(*handle).unwrap()), tokens.len());
                assert_eq!(
                    self.cache.page_hashes(name, &found),
                    page_hashes(name, tokens, self.cache.config().page_size)
                );
            } else {
                assert!(self.cache.prefix_len(*handle).is_err(), "{place:?} is gone");
            }
        }
    }

    fn compare_counts(&self) {
        let (cache, model) = (&self.cache, &self.model);
        let num_locked = model.num_locked();
        assert_eq!(len(cache.num_free()), model.num_free(), "free");
        assert_eq!(len(cache.num_held()), model.held.len(), "held");
        assert_eq!(len(cache.num_locked()), num_locked, "locked");
        assert_eq!(
            len(cache.num_evictable()),
            model.entries.len() - num_locked,
            "evictable"
        );
        assert_eq!(cache.num_receipts(), model.num_receipts, "receipts");
    }

    /// A page of the key is a few tokens that often agree in part with those of another symbol.
    fn tokens(&self, key: &[u8]) -> Vec<u32> {
        let page = |symbol: &u8| {
            let mut page = vec![7; self.model.page_size];
            page[0] = u32::from(symbol & 1);
            *page.last_mut().unwrap() += u32::from(symbol >> 1);
            page
        };
        key.iter().flat_map(page).collect()
    }

    fn remember(&mut self, handle: NodeHandle, place: Place) {
        if self.places.len() == 24 {
            self.places.remove(0);
        }
        self.places.push((handle, place));
    }

    fn match_prefix(&mut self, namespace: usize, key: &[u8], extra: usize) {
        let namespace = namespace % self.namespaces.len();
        let mut tokens = self.tokens(key);
        tokens.extend(vec![7; extra % self.model.page_size]);
        let expected = self.model.pages(namespace, &tokens);
        let place = self.model.touch(namespace, &tokens, expected.len());
        let name = &self.namespaces[namespace];
        let dry = self.cache.match_dry_run(name, &tokens);
        let found = self.cache.match_prefix(name, &tokens);
        assert_eq!(found.pages, expected);
        assert_eq!(len(found.cached_len), expected.len() * self.model.page_size);
        assert_eq!(dry, found.cached_len);
        self.remember(found.node, place);
    }

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

    fn insert(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        keep: bool,
        at: Option<&(NodeHandle, Place)>,
    ) {
        let Some(mut row) = self.row(namespace, tokens, keep) else {
            return;
        };
        let tree = self.model.pages(namespace, tokens);
        let name = &self.namespaces[namespace];
        let mut skipped = 0;
        let result = match at {
            Some((handle, place)) if self.model.is_live(place) => {
                // What comes before the node is not looked at.
                skipped = place.prefix.1.len() / self.model.page_size;
                row[..skipped].fill(0);
                self.cache.insert_at(name, *handle, tokens, &row)
            }
            Some((handle, _)) => {
                let result = self.cache.insert_at(name, *handle, tokens, &row);
                assert!(matches!(result, Err(CacheError::StaleHandle { .. })));
                return;
            }
            None => self.cache.insert(name, tokens, &row),
        };
        let Inserted {
            node,
            reused_len,
            replaced,
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
        let place = self.model.touch(namespace, tokens, row.len());
        self.remember(node, place);
    }

    fn insert_at(&mut self, place: usize, key: &[u8], keep: bool) {
        if self.places.is_empty() {
            return;
        }
        let (handle, place) = self.places[place % self.places.len()].clone();
        let namespace = place.prefix.0;
        let mut tokens = place.prefix.1.clone();
        tokens.extend(self.tokens(key));
        self.insert(namespace, &tokens, keep, Some(&(handle, place)));
    }

    fn lock(&mut self, place: usize) {
        if self.places.is_empty() {
            return;
        }
        let (handle, place) = self.places[place % self.places.len()].clone();
        match self.cache.lock(handle) {
            Ok(receipt) => {
                assert!(self.model.is_live(&place), "locked what is gone");
                assert_eq!(receipt.node(), handle);
                self.model.lock(&place);
                self.receipts.push((receipt, place));
            }
            Err(error) => {
                assert!(!self.model.is_live(&place), "{error}");
            }
        }
    }

    fn unlock(&mut self, receipt: usize) {
        if self.receipts.is_empty() {
            return;
        }
        let (receipt, place) = self.receipts.swap_remove(receipt % self.receipts.len());
        assert!(self.model.is_live(&place), "a locked prefix went");
        self.cache.unlock(receipt);
        self.model.unlock(&place);
    }

    fn flush(&mut self) {
        if self.receipts.is_empty() {
            let freed = self.model.evict(usize::MAX).len();
            assert_eq!(self.cache.flush(), Ok(number(freed)));
        } else {
            let refused = Err(CacheError::Locked {
                num_receipts: self.model.num_receipts,
                num_pages: number(self.model.num_locked()),
            });
            assert_eq!(self.cache.flush(), refused);
        }
    }

    fn refuse(&mut self, page: PageId) {
        if self.model.held.contains(&page) {
            return;
        }
        assert!(!self.cache.is_held(page));
        let not_held = CacheError::PageNotHeld { page };
        assert_eq!(self.cache.try_free(&[page]), Err(not_held.clone()));
        let name = &self.namespaces[0];
        let tokens = self.tokens(&[1]);
        if self.model.pages(0, &tokens) != [page] {
            assert_eq!(self.cache.insert(name, &tokens, &[page]), Err(not_held));
        }
        let result = self.cache.insert(name, &tokens, &[]);
        assert!(matches!(result, Err(CacheError::PageMismatch { .. })));
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        for (receipt, _) in self.receipts.drain(..) {
            receipt.abandon();
        }
    }
}
