//! The cache as one object: configuration, page counts, and what the other files work on.

use crate::arena::{Arena, NodeHandle};
use crate::children::ChildIndex;
use crate::error::CacheError;
use crate::hash::{page_hashes, PageHash};
use crate::key::{ChildHasher, Namespace, Namespaces};
use crate::order::EvictionOrder;
use crate::page::PageId;
use crate::pool::{PagePool, PageState};
use crate::tokens::TokenStore;

/// Shape of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Tokens a page holds; a power of two.
    pub page_size: u32,
    /// Usable pages, numbered from 1; page 0 comes on top.
    pub num_pages: u32,
    /// With false nothing is ever cached: a match gives 0 and an insert frees the pages it gets.
    pub enabled: bool,
}

impl CacheConfig {
    fn check(&self) -> Result<(), CacheError> {
        let invalid = |field, value, requirement| {
            Err(CacheError::InvalidConfig {
                field,
                value,
                requirement,
            })
        };
        if !self.page_size.is_power_of_two() {
            return invalid("page_size", self.page_size.into(), "a power of two");
        }
        let num_tokens = (u64::from(self.num_pages) + 1) * u64::from(self.page_size);
        if self.num_pages == 0 || num_tokens > u64::from(u32::MAX) {
            let requirement = "at least 1, with less than 2^32 tokens in all pages";
            return invalid("num_pages", self.num_pages.into(), requirement);
        }
        Ok(())
    }
}

/// The radix tree over cached prefixes together with the FULL page pool.
///
/// Pages are in one of three hands, and the counts always add up:
/// `num_free + num_held + num_evictable + num_locked == num_pages`.
#[derive(Debug)]
pub struct RadixCache {
    pub(crate) config: CacheConfig,
    pub(crate) arena: Arena,
    pub(crate) children: ChildIndex,
    pub(crate) hasher: ChildHasher,
    pub(crate) namespaces: Namespaces,
    pub(crate) order: EvictionOrder,
    pub(crate) pool: PagePool,
    pub(crate) tokens: TokenStore,
    pub(crate) num_evictable: u32,
    pub(crate) num_receipts: u32,
}

impl RadixCache {
    /// An empty cache that owns pages `1..=num_pages`.
    ///
    /// # Errors
    /// [`CacheError::InvalidConfig`] names the field that is wrong.
    pub fn new(config: CacheConfig) -> Result<Self, CacheError> {
        config.check()?;
        Ok(Self {
            config,
            arena: Arena::new(),
            children: ChildIndex::default(),
            hasher: ChildHasher::new(),
            namespaces: Namespaces::default(),
            order: EvictionOrder::default(),
            pool: PagePool::new(config.num_pages),
            tokens: TokenStore::new(config.page_size, config.num_pages),
            num_evictable: 0,
            num_receipts: 0,
        })
    }

    /// The configuration given to [`new`](Self::new).
    #[must_use]
    pub fn config(&self) -> CacheConfig {
        self.config
    }

    /// Hands out `count` free pages, appended to `out`; all or nothing. Never evicts.
    #[must_use = "false means that no page was handed out"]
    pub fn allocate(&mut self, count: u32, out: &mut Vec<PageId>) -> bool {
        self.pool.allocate(count, out)
    }

    /// Takes back pages that the caller holds.
    ///
    /// # Panics
    /// If a page is not held (freed twice, in the tree, page 0): going on would give one page to
    /// two requests.
    pub fn free(&mut self, pages: &[PageId]) {
        if let Err(error) = self.try_free(pages) {
            panic!("{error}");
        }
    }

    /// Like [`free`](Self::free), for callers that cannot vouch for their list.
    ///
    /// # Errors
    /// [`CacheError::PageNotHeld`] with the first wrong page; nothing was freed then.
    pub fn try_free(&mut self, pages: &[PageId]) -> Result<(), CacheError> {
        self.pool.free_held(pages)
    }

    /// Whether the caller owns this page.
    #[must_use]
    pub fn is_held(&self, page: PageId) -> bool {
        self.pool.state(page) == Some(PageState::Held)
    }

    /// All usable pages.
    #[must_use]
    pub fn num_pages(&self) -> u32 {
        self.pool.num_pages()
    }

    /// Pages in the free list.
    #[must_use]
    pub fn num_free(&self) -> u32 {
        self.pool.num_free()
    }

    /// Pages in the tree that no receipt locks.
    #[must_use]
    pub fn num_evictable(&self) -> u32 {
        self.num_evictable
    }

    /// Pages in the tree under a lock.
    #[must_use]
    pub fn num_locked(&self) -> u32 {
        self.pool.num_tree() - self.num_evictable
    }

    /// Pages handed out and neither freed nor inserted yet.
    #[must_use]
    pub fn num_held(&self) -> u32 {
        self.num_pages() - self.num_free() - self.pool.num_tree()
    }

    /// Receipts that were not given back yet.
    #[must_use]
    pub fn num_receipts(&self) -> u32 {
        self.num_receipts
    }

    /// Tokens from the root to the end of `node`.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`].
    pub fn prefix_len(&self, node: NodeHandle) -> Result<u32, CacheError> {
        let index = self.arena.resolve(node)?;
        Ok(self.arena[index].end_page * self.config.page_size)
    }

    /// Chained hash of each whole page of `tokens`; see [`page_hashes`].
    #[must_use]
    pub fn page_hashes(&self, namespace: &Namespace, tokens: &[u32]) -> Vec<PageHash> {
        page_hashes(namespace, tokens, self.config.page_size)
    }

    /// The tokens of a cached prefix, as the tree holds them.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`].
    pub fn prefix_tokens(&self, node: NodeHandle) -> Result<Vec<u32>, CacheError> {
        let mut index = self.arena.resolve(node)?;
        let mut path = Vec::new();
        while !self.arena[index].is_root() {
            path.push(index);
            index = self.arena[index].parent;
        }
        let pages = path.iter().rev().flat_map(|&node| &self.arena[node].pages);
        Ok(pages
            .flat_map(|&page| self.tokens.page(page))
            .copied()
            .collect())
    }

    pub(crate) fn page_size(&self) -> usize {
        self.config.page_size as usize
    }
}
