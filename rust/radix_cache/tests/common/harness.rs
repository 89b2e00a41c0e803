//! Runs the same operations on the cache and on the flat model, and compares after each.

use dsserve_radix_cache::{
    CacheConfig, CacheError, Component, ComponentConfig, EvictionPolicy, Match, Medium, Namespace,
    NodeHandle, PageId, RadixCache, Receipt, Retention,
};

use super::index::EventIndex;
use super::model::{Cause, Model, Place};
use super::model_tails::ModelComponent;
use super::namespaces;

/// One operation; indices are taken modulo what exists.
#[derive(Clone, Debug)]
pub enum Op {
    Match {
        namespace: usize,
        key: Vec<u8>,
        extra: usize,
    },
    /// A request that waits looks its prompt up; with a remembered match, what follows that.
    LookUp {
        namespace: usize,
        key: Vec<u8>,
        known: usize,
    },
    /// What was looked up is used.
    CountHit {
        place: usize,
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
    /// A copy of a node's pages was made or went.
    Copy {
        place: usize,
        medium: usize,
        is_stored: bool,
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
    pub(super) replay_len: usize,
    pub(super) namespaces: Vec<Namespace>,
    pub(super) places: Vec<(NodeHandle, Place)>,
    receipts: Vec<(Receipt, Place, bool)>,
    /// What was matched: namespace, tokens, result.
    pub(super) matches: Vec<(usize, Vec<u32>, Match)>,
    pub(super) index: Option<EventIndex>,
}

pub(super) fn len(value: u32) -> usize {
    value as usize
}

pub(super) fn number(value: usize) -> u32 {
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
            Op::LookUp {
                namespace,
                key,
                known,
            } => self.look_up(*namespace, key, *known),
            Op::CountHit { place } => self.count_hit(*place),
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
            Op::Copy {
                place,
                medium,
                is_stored,
            } => self.note_copy(*place, Medium::ALL[*medium], *is_stored),
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

    pub(super) fn usable(&self, namespace: usize, tokens: &[u32]) -> usize {
        let found = self.model.usable_pages(namespace, tokens).len() * self.model.page_size;
        if found > self.replay_len {
            found
        } else {
            0
        }
    }

    /// A page of the key is a few tokens that often agree in part with those of another symbol.
    pub(super) fn tokens(&self, key: &[u8]) -> Vec<u32> {
        let page = |symbol: &u8| {
            let mut page = vec![7; self.model.page_size];
            page[0] = u32::from(symbol & 1);
            *page.last_mut().unwrap() += u32::from(symbol >> 1);
            page
        };
        key.iter().flat_map(page).collect()
    }

    pub(super) fn remember(&mut self, handle: NodeHandle, place: Place) {
        if self.places.len() == 24 {
            self.places.remove(0);
        }
        self.places.push((handle, place));
    }

    fn match_prefix(&mut self, namespace: usize, key: &[u8], extra: usize) {
        let namespace = namespace % self.namespaces.len();
        let mut tokens = self.tokens(key);
        tokens.extend(vec![7; extra % self.model.page_size]);
        self.check_match(namespace, tokens, Cause::Hit, |cache, name, tokens| {
            cache.match_prefix(name, tokens)
        });
    }

    fn look_up(&mut self, namespace: usize, key: &[u8], known: usize) {
        let known = self.matches.get(known).cloned();
        let (namespace, mut tokens, known) = match known {
            Some((namespace, tokens, found)) => {
                let tokens = tokens[..len(found.cached_len)].to_vec();
                (namespace, tokens, Some(found))
            }
            None => (namespace % self.namespaces.len(), Vec::new(), None),
        };
        tokens.extend(self.tokens(key));
        self.check_match(namespace, tokens, Cause::LookUp, |cache, name, tokens| {
            cache.look_up(name, tokens, known)
        });
    }

    fn count_hit(&mut self, place: usize) {
        if self.places.is_empty() {
            return;
        }
        let (handle, place) = self.places[place % self.places.len()].clone();
        let is_live = self.model.is_live(&place);
        assert_eq!(self.cache.count_hit(handle).is_ok(), is_live);
        if is_live {
            let (namespace, tokens) = &place.prefix;
            let num_pages = tokens.len() / self.model.page_size;
            self.model.touch(*namespace, tokens, num_pages, Cause::Hit);
        }
    }

    fn check_match(
        &mut self,
        namespace: usize,
        tokens: Vec<u32>,
        cause: Cause,
        find: impl FnOnce(&mut RadixCache, &Namespace, &[u32]) -> Match,
    ) {
        let cached_len = self.usable(namespace, &tokens);
        let num_pages = cached_len / self.model.page_size;
        let full = self.model.pages(namespace, &tokens);
        let place = self.model.touch(namespace, &tokens, num_pages, cause);
        let name = &self.namespaces[namespace];
        let dry = self.cache.match_dry_run(name, &tokens);
        let found = find(&mut self.cache, name, &tokens);
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

    fn note_copy(&mut self, place: usize, medium: Medium, is_stored: bool) {
        if self.places.is_empty() {
            return;
        }
        let (handle, place) = self.places[place % self.places.len()].clone();
        let noted = self.cache.note_copy(handle, medium, is_stored);
        if !self.model.is_live(&place) {
            assert!(noted.is_err());
            return;
        }
        let changed = self.model.note_copy(&place.prefix, medium, is_stored);
        assert_eq!(noted, Ok(changed));
        let residence = self.cache.residence(handle).unwrap();
        let has = |medium| self.model.has_copy(&place.prefix, medium);
        assert_eq!(
            (residence.host, residence.storage),
            (has(Medium::Cpu), has(Medium::Storage))
        );
        assert_eq!(residence.device, !place.prefix.1.is_empty());
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
}

impl Drop for Harness {
    fn drop(&mut self) {
        for (receipt, ..) in self.receipts.drain(..) {
            receipt.abandon();
        }
    }
}
