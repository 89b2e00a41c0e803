//! The cache as one object: configuration, page counts, and what the other files work on.

use crate::arena::{Arena, NodeHandle};
use crate::children::ChildIndex;
use crate::component::Trailing;
use crate::config::{CacheConfig, Component};
use crate::error::CacheError;
use crate::event::EventLog;
use crate::evict::Retired;
use crate::hash::HashStore;
use crate::key::{ChildHasher, Namespaces};
use crate::order::EvictionOrder;
use crate::page::PageId;
use crate::policy::Uses;
use crate::pool::{PagePool, PageState};
use crate::tier::CopyStore;
use crate::tokens::TokenStore;

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
    pub(crate) retired: Retired,
    /// Evictable nodes by FULL's policy.
    pub(crate) order: EvictionOrder,
    /// What the policies other than LRU know.
    pub(crate) uses: Uses,
    pub(crate) pool: PagePool,
    pub(crate) tokens: TokenStore,
    pub(crate) hashes: HashStore,
    /// Where pages lie besides the device.
    pub(crate) copies: CopyStore,
    /// Components besides FULL that the tree holds.
    pub(crate) trailing: Vec<Trailing>,
    /// Hits of at most this many tokens are of no use.
    pub(crate) min_hit: u32,
    pub(crate) events: Option<EventLog>,
    /// Counts changes that may make a match longer.
    pub(crate) version: u64,
    pub(crate) num_evictable: u32,
    pub(crate) num_receipts: u32,
    /// Receipts that keep data of the other components, too.
    pub(crate) num_tail_receipts: u32,
}

/// Nodes to reserve room for at the start.
///
/// A table that grows while requests run stalls them: moving 65,536 nodes takes milliseconds. Room
/// that is not used costs address space only (and a byte a node in the child index).
fn expected_nodes(num_pages: u32) -> usize {
    const MOST: u32 = 1 << 20;
    (num_pages / 4).min(MOST) as usize
}

/// Pages of one component by owner; the four parts add up to `num_pages`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolCounts {
    /// All usable pages.
    pub num_pages: u32,
    /// In the free list.
    pub num_free: u32,
    /// Handed out and neither freed nor inserted yet.
    pub num_held: u32,
    /// In the tree, and nobody keeps them there.
    pub num_evictable: u32,
    /// In the tree under a lock.
    pub num_locked: u32,
}

impl RadixCache {
    /// An empty cache that owns pages `1..=num_pages`.
    ///
    /// # Errors
    /// [`CacheError::InvalidConfig`] names the field that is wrong.
    pub fn new(config: CacheConfig) -> Result<Self, CacheError> {
        config.check()?;
        let capacity = expected_nodes(config.num_pages);
        let trailing = config.components().filter_map(|(kind, component)| {
            Trailing::new(kind, component, config.page_size, capacity)
        });
        let trailing: Vec<Trailing> = trailing.collect();
        let all_lists = trailing.iter().all(|trailing| trailing.order.is_list());
        let order = EvictionOrder::new(config.policy, capacity);
        Ok(Self {
            config,
            arena: Arena::new(capacity),
            children: ChildIndex::new(capacity),
            hasher: ChildHasher::new(),
            namespaces: Namespaces::default(),
            retired: Retired::default(),
            uses: Uses::new(!(all_lists && order.is_list()), capacity),
            order,
            pool: PagePool::new(config.num_pages),
            tokens: TokenStore::new(config.page_size, config.num_pages),
            hashes: HashStore::default(),
            copies: CopyStore::default(),
            trailing,
            min_hit: config.replay_len(),
            events: config.event_batches.map(EventLog::new),
            version: 0,
            num_evictable: 0,
            num_receipts: 0,
            num_tail_receipts: 0,
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

    /// [`allocate`](Self::allocate) for any component.
    ///
    /// # Errors
    /// [`CacheError::NoComponent`] if the tree does not hold it.
    pub fn allocate_component(
        &mut self,
        component: Component,
        count: u32,
        out: &mut Vec<PageId>,
    ) -> Result<bool, CacheError> {
        Ok(self.pool_of(component)?.allocate(count, out))
    }

    /// Hands out free pages of several components, appended to `out` one component after the other;
    /// all or nothing.
    ///
    /// # Errors
    /// [`CacheError::NoComponent`] if the tree does not hold one of them.
    pub fn allocate_all(
        &mut self,
        counts: &[(Component, u32)],
        out: &mut Vec<PageId>,
    ) -> Result<bool, CacheError> {
        for &(component, _) in counts {
            self.pool_of(component)?;
        }
        let before = out.len();
        for (done, &(component, count)) in counts.iter().enumerate() {
            if self.pool_of(component)?.allocate(count, out) {
                continue;
            }
            let mut given = out.split_off(before);
            for &(component, count) in counts[..done].iter().rev() {
                let pages = given.split_off(given.len() - count as usize);
                self.pool_of(component)?.free_held(&pages)?;
            }
            return Ok(false);
        }
        Ok(true)
    }

    /// [`try_free`](Self::try_free) for any component.
    ///
    /// # Errors
    /// That of `try_free`; [`CacheError::NoComponent`] if the tree does not hold it.
    pub fn free_component(
        &mut self,
        component: Component,
        pages: &[PageId],
    ) -> Result<(), CacheError> {
        self.pool_of(component)?.free_held(pages)
    }

    /// Pages of a component by owner.
    ///
    /// # Errors
    /// [`CacheError::NoComponent`] if the tree does not hold it.
    pub fn pool_counts(&self, component: Component) -> Result<PoolCounts, CacheError> {
        let (pool, num_evictable) = if component == Component::Full {
            (&self.pool, self.num_evictable)
        } else {
            let trailing = &self.trailing[self.trailing_at(component)?];
            (&trailing.pool, trailing.num_evictable)
        };
        let num_tree = pool.num_tree();
        Ok(PoolCounts {
            num_pages: pool.num_pages(),
            num_free: pool.num_free(),
            num_held: pool.num_pages() - pool.num_free() - num_tree,
            num_evictable,
            num_locked: num_tree - num_evictable,
        })
    }

    fn pool_of(&mut self, component: Component) -> Result<&mut PagePool, CacheError> {
        if component == Component::Full {
            return Ok(&mut self.pool);
        }
        let at = self.trailing_at(component)?;
        Ok(&mut self.trailing[at].pool)
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

    /// The tokens of a cached prefix, as the tree holds them.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`].
    pub fn prefix_tokens(&self, node: NodeHandle) -> Result<Vec<u32>, CacheError> {
        let path = self.path_to(self.arena.resolve(node)?);
        let pages = path.iter().flat_map(|&node| self.arena[node].pages());
        Ok(pages
            .flat_map(|&page| self.tokens.page(page))
            .copied()
            .collect())
    }

    pub(crate) fn page_size(&self) -> usize {
        self.config.page_size as usize
    }
}
