//! Runs the same operations on the cache and on the flat model, and compares after each.

use dsserve_radix_cache::{
    page_hashes, CacheConfig, CacheError, Component, ComponentConfig, EvictionPolicy,
    InsertOptions, Inserted, Match, Namespace, NodeHandle, PageId, RadixCache, Receipt, Replaced,
    Retention, TailPages,
};

use super::index::EventIndex;
use super::model::{Cause, Model, Place};
use super::model_tails::{ModelComponent, TailOutcome};
use super::namespaces;

/// One operation; indices are taken modulo what exists.
#[derive(Clone, Debug)]
pub enum Op {
    Match {
        namespace: usize,
        key: Vec<u8>,
        extra: usize,
    },
    /// `keep`: use the tree's pages where there are some, as after a match. `tail`: pages of each
    /// component to bring, of all that cover the key (255: exactly the window).
    Insert {
        namespace: usize,
        key: Vec<u8>,
        keep: bool,
        tail: u8,
        priority: i32,
    },
    InsertAt {
        place: usize,
        key: Vec<u8>,
        keep: bool,
        tail: u8,
    },
    Lock {
        place: usize,
    },
    Unlock {
        receipt: usize,
    },
    ReleaseWindow {
        receipt: usize,
    },
    Evict {
        count: u32,
    },
    EvictTails {
        component: usize,
        count: u32,
    },
    Free {
        count: usize,
    },
    Flush,
    Retire,
    /// Calls that must be refused and change nothing.
    Wrong {
        page: PageId,
    },
}

/// The cache that operations run on.
#[derive(Clone, Debug)]
pub struct Setup {
    pub page_size: u32,
    pub num_pages: u32,
    pub policy: EvictionPolicy,
    /// Window, tokens a page (of at most a FULL page), number of pages.
    pub components: Vec<(u32, u32, u32)>,
    pub replay_len: u32,
    pub events: bool,
}

impl Setup {
    fn config(&self) -> CacheConfig {
        let mut config = CacheConfig::new(self.page_size, self.num_pages).with_policy(self.policy);
        if self.events {
            config = config.with_events(4);
        }
        for (&(window, page_tokens, num_pages), kind) in
            self.components.iter().zip(Component::OPTIONAL)
        {
            let retention = if window == u32::MAX {
                Retention::Path
            } else {
                Retention::Trailing(window)
            };
            let component =
                ComponentConfig::new(retention, page_tokens.min(self.page_size), num_pages);
            config = config.with_component(kind, component);
        }
        let retention = Retention::None {
            replay_len: self.replay_len,
        };
        config.with_component(Component::State, ComponentConfig::new(retention, 1, 1))
    }
}

pub struct Harness {
    pub cache: RadixCache,
    pub model: Model,
    replay_len: usize,
    namespaces: Vec<Namespace>,
    places: Vec<(NodeHandle, Place)>,
    receipts: Vec<(Receipt, Place, bool)>,
    /// What was matched: namespace, tokens, result.
    matches: Vec<(usize, Vec<u32>, Match)>,
    index: Option<EventIndex>,
}

fn len(value: u32) -> usize {
    value as usize
}

fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

impl Harness {
    pub fn new(setup: &Setup) -> Self {
        let mut model = Model::new(len(setup.page_size), len(setup.num_pages), setup.policy);
        for (&(window, page_tokens, num_pages), kind) in
            setup.components.iter().zip(Component::OPTIONAL)
        {
            model.components.push(ModelComponent {
                kind,
                window: len(window),
                page_tokens: len(page_tokens.min(setup.page_size)),
                num_pages: len(num_pages),
                held: std::collections::BTreeSet::new(),
            });
        }
        Self {
            cache: RadixCache::new(setup.config()).unwrap(),
            model,
            replay_len: len(setup.replay_len),
            namespaces: namespaces(),
            places: Vec::new(),
            receipts: Vec::new(),
            matches: Vec::new(),
            index: setup.events.then(EventIndex::default),
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
                tail,
                priority,
            } => {
                let namespace = namespace % self.namespaces.len();
                let tokens = self.tokens(key);
                self.insert(namespace, &tokens, (*keep, *tail), *priority, None);
            }
            Op::InsertAt {
                place,
                key,
                keep,
                tail,
            } => self.insert_at(*place, key, (*keep, *tail)),
            Op::Lock { place } => self.lock(*place),
            Op::Unlock { receipt } => self.unlock(*receipt),
            Op::ReleaseWindow { receipt } => self.release_window(*receipt),
            Op::Evict { count } => {
                let freed = self.model.evict(len(*count));
                assert_eq!(len(self.cache.evict(*count)), freed, "pages evicted");
            }
            Op::EvictTails { component, count } => self.evict_tails(*component, *count),
            Op::Free { count } => self.free(*count),
            Op::Flush => self.flush(),
            Op::Retire => {
                self.cache.retire_generations(1);
                self.model.retired = (0..self.namespaces.len())
                    .filter(|&name| self.namespaces[name].model_generation < 1)
                    .collect();
            }
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
        self.free(usize::MAX);
        for counts in [self.cache.pool_counts(Component::Full)].into_iter().chain(
            self.model
                .components
                .iter()
                .map(|c| self.cache.pool_counts(c.kind)),
        ) {
            let counts = counts.unwrap();
            assert_eq!(counts.num_free, counts.num_pages, "pages leaked");
        }
        self.cache.check_invariants().unwrap();
    }

    /// Every prefix of the model is found, and nothing beyond; handles, matches, hashes and events
    /// agree.
    pub fn compare_all(&mut self) {
        self.cache.check_invariants().unwrap();
        for (namespace, tokens) in self.model.entries.keys() {
            let name = &self.namespaces[*namespace];
            let mut longer = tokens.clone();
            let expected = self.usable(*namespace, tokens);
            assert_eq!(len(self.cache.match_dry_run(name, tokens)), expected);
            longer.extend(vec![9; self.model.page_size]);
            assert_eq!(len(self.cache.match_dry_run(name, &longer)), expected);
        }
        for (handle, place) in &self.places {
            if !self.model.is_live(place) {
                assert!(self.cache.prefix_len(*handle).is_err(), "{place:?} is gone");
                continue;
            }
            let (namespace, tokens) = &place.prefix;
            let name = &self.namespaces[*namespace];
            let found = self.cache.prefix_tokens(*handle).unwrap();
            assert_eq!(&found, tokens, "a handle keeps its prefix");
            assert_eq!(len(self.cache.prefix_len(*handle).unwrap()), tokens.len());
            let page_size = self.cache.config().page_size;
            let hashes = page_hashes(name, tokens, page_size);
            assert_eq!(self.cache.page_hashes(name, &found), hashes);
            if self.index.is_some() {
                // Kept hashes do not see the splits; not asked for without events, so that both
                // ways of keeping are tried.
                assert_eq!(self.cache.prefix_hashes(*handle).unwrap(), hashes);
            }
            for (at, component) in self.model.components.iter().enumerate() {
                let mut pages = Vec::new();
                let count = self.cache.tail_pages(*handle, component.kind, &mut pages);
                assert_eq!(pages, self.model.tail_pages(at, &place.prefix));
                assert_eq!(len(count.unwrap()), pages.len());
            }
        }
        self.compare_matches();
        self.compare_events();
    }

    /// A match that counts as current would give the same again.
    fn compare_matches(&self) {
        for (namespace, tokens, found) in &self.matches {
            let name = &self.namespaces[*namespace];
            let now = self.cache.match_dry_run(name, tokens);
            if self.cache.is_current(found, tokens) {
                assert_eq!(now, found.cached_len, "a current match changed");
            } else {
                assert!(!self.cache.unchanged_since(found.node, found.version));
            }
            if self.cache.unchanged_since(found.node, found.version) {
                assert_eq!(now, found.cached_len, "an unchanged match changed");
            }
        }
    }

    fn compare_events(&mut self) {
        let Some(index) = &mut self.index else {
            return;
        };
        index.follow(&mut self.cache);
        let page_size = self.cache.config().page_size;
        let entries = self.model.entries.keys().map(|(namespace, tokens)| {
            let name = &self.namespaces[*namespace];
            let hash = *page_hashes(name, tokens, page_size).last().unwrap();
            dsserve_radix_cache::block_hash(name, &hash)
        });
        index.compare(entries, &mut self.cache);
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
        for (at, component) in model.components.iter().enumerate() {
            let counts = cache.pool_counts(component.kind).unwrap();
            let evictable = model.num_evictable_tail(at);
            let num_tree = model.num_tail_pages(at);
            assert_eq!(len(counts.num_held), component.held.len(), "held tails");
            assert_eq!(len(counts.num_evictable), evictable, "evictable tails");
            assert_eq!(len(counts.num_locked), num_tree - evictable, "locked tails");
        }
    }

    fn usable(&self, namespace: usize, tokens: &[u32]) -> usize {
        let found = self.model.usable_pages(namespace, tokens).len() * self.model.page_size;
        if found > self.replay_len {
            found
        } else {
            0
        }
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
        let cached_len = self.usable(namespace, &tokens);
        let num_pages = cached_len / self.model.page_size;
        let full = self.model.pages(namespace, &tokens);
        let place = self.model.touch(namespace, &tokens, num_pages, Cause::Hit);
        let name = &self.namespaces[namespace];
        let dry = self.cache.match_dry_run(name, &tokens);
        let found = self.cache.match_prefix(name, &tokens);
        assert_eq!(found.pages, full[..num_pages]);
        assert_eq!(len(found.cached_len), cached_len);
        assert_eq!(len(found.full_len), full.len() * self.model.page_size);
        assert_eq!((dry, found.host_len), (found.cached_len, 0));
        assert!(self.cache.unchanged_since(found.node, found.version));
        assert!(self.cache.is_current(&found, &tokens));
        self.remember(found.node, place);
        if self.matches.len() == 16 {
            self.matches.remove(0);
        }
        self.matches.push((namespace, tokens, found));
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

    fn insert(
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
        assert_eq!(outcomes.len(), tails.len());
        for ((at, pages), outcome) in tails.iter().enumerate().zip(outcomes) {
            let expected = self.model.insert_tail(at, namespace, tokens, pages);
            let replaced = outcome.replaced.iter();
            let replaced = replaced.map(|page| (len(page.page_index), page.own, page.tree));
            let found = TailOutcome {
                num_kept: len(outcome.num_kept),
                replaced: replaced.collect(),
            };
            assert_eq!(found, expected, "what became of a tail");
        }
        let cause = Cause::Insert(priority);
        let place = self.model.touch(namespace, tokens, row.len(), cause);
        self.remember(node, place);
    }

    fn insert_at(&mut self, place: usize, key: &[u8], how: (bool, u8)) {
        if self.places.is_empty() {
            return;
        }
        let (handle, place) = self.places[place % self.places.len()].clone();
        let namespace = place.prefix.0;
        let mut tokens = place.prefix.1.clone();
        tokens.extend(self.tokens(key));
        self.insert(namespace, &tokens, how, i32::MIN, Some(&(handle, place)));
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
                self.receipts.push((receipt, place, true));
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
        let at = receipt % self.receipts.len();
        let (receipt, place, keeps_tails) = self.receipts.swap_remove(at);
        assert!(self.model.is_live(&place), "a locked prefix went");
        self.cache.unlock(receipt);
        self.model.unlock(&place, keeps_tails);
    }

    fn release_window(&mut self, receipt: usize) {
        if self.receipts.is_empty() {
            return;
        }
        let at = receipt % self.receipts.len();
        let (receipt, place, keeps_tails) = self.receipts.swap_remove(at);
        let receipt = self.cache.release_window(receipt);
        if keeps_tails && place.birth != 0 {
            self.model.unlock_tails(&place);
        }
        self.receipts.push((receipt, place, false));
    }

    fn evict_tails(&mut self, component: usize, count: u32) {
        if self.model.components.is_empty() {
            return;
        }
        let at = component % self.model.components.len();
        let kind = self.model.components[at].kind;
        let expected = self.model.evict_tails(at, len(count));
        let freed = self.cache.evict_component(kind, count).unwrap();
        assert_eq!(len(freed), expected, "tail pages evicted");
    }

    fn free(&mut self, count: usize) {
        let pages: Vec<PageId> = self.model.held.iter().copied().take(count).collect();
        self.cache.free(&pages);
        self.model.held.retain(|page| !pages.contains(page));
        for component in &mut self.model.components {
            let pages: Vec<PageId> = component.held.iter().copied().take(count).collect();
            self.cache.free_component(component.kind, &pages).unwrap();
            component.held.retain(|page| !pages.contains(page));
        }
    }

    fn flush(&mut self) {
        if self.receipts.is_empty() {
            let freed = self.model.evict(usize::MAX);
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
        self.refuse_tail(page);
    }

    /// A tail with a page that is not the caller's, and an unknown component.
    fn refuse_tail(&mut self, page: PageId) {
        let own = self.model.held.first().copied();
        let Some(component) = self.model.components.first() else {
            let result = self.cache.evict_component(Component::Window, 1);
            assert!(matches!(result, Err(CacheError::NoComponent { .. })));
            return;
        };
        let tokens = vec![8; self.model.page_size];
        let Some(own) = own.filter(|_| !component.held.contains(&page)) else {
            return;
        };
        let tails = [TailPages {
            component: component.kind,
            pages: &[page],
        }];
        let options = InsertOptions::default().with_tails(&tails);
        let name = &self.namespaces[0];
        let result = self.cache.insert_with(name, &tokens, &[own], options);
        assert_eq!(result, Err(CacheError::PageNotHeld { page }));
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        for (receipt, ..) in self.receipts.drain(..) {
            receipt.abandon();
        }
    }
}
