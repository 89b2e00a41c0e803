//! Calls of the harness that the cache must refuse without changing anything.

use dsserve_radix_cache::{CacheError, Component, InsertOptions, PageId, TailPages};

use super::harness::Harness;

impl Harness {
    pub(super) fn refuse(&mut self, page: PageId) {
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
