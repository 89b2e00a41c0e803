//! What must agree between the cache and the model after operations.

use dsserve_radix_cache::{block_hash, page_hashes, Medium};

use super::harness::{len, Harness};

impl Harness {
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
        let entries = self
            .model
            .entries
            .iter()
            .flat_map(|((namespace, tokens), entry)| {
                let name = &self.namespaces[*namespace];
                let hash = *page_hashes(name, tokens, page_size).last().unwrap();
                let hash = block_hash(name, &hash);
                let media = [Medium::Gpu]
                    .into_iter()
                    .chain(entry.copies.iter().copied());
                media.map(move |medium| (hash, medium))
            });
        index.compare(entries, &mut self.cache);
    }

    pub(super) fn compare_counts(&self) {
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
}
