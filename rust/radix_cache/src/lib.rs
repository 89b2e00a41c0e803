//! Paged radix prefix cache of the dsserve engine.
//!
//! [`RadixCache`] answers which token prefixes have their KV on the device, on which pages, and
//! who uses them. It owns the FULL page pool: a page is free, held by a caller (between
//! [`RadixCache::allocate`] and [`RadixCache::free`] or [`RadixCache::insert`]), or in the tree.
//! Everything is single-threaded (`&mut self`), does no I/O and reads no clock, so a run replays
//! exactly.
//!
//! ```
//! use dsserve_radix_cache::{CacheConfig, Namespace, RadixCache};
//!
//! let mut cache = RadixCache::new(CacheConfig::new(2, 8))?;
//! let namespace = Namespace::default();
//! let prompt = [10, 11, 12, 13, 14];
//!
//! let mut pages = Vec::new();
//! assert!(cache.allocate(2, &mut pages));
//! cache.insert(&namespace, &prompt[..4], &pages)?;
//!
//! let hit = cache.match_prefix(&namespace, &prompt);
//! assert_eq!((hit.cached_len, hit.pages), (4, pages));
//! let receipt = cache.lock(hit.node)?;
//! assert_eq!(cache.evict(1), 0, "locked pages stay");
//! cache.unlock(receipt);
//! # Ok::<(), dsserve_radix_cache::CacheError>(())
//! ```

mod arena;
mod cache;
mod check;
mod check_tails;
mod children;
mod component;
mod config;
mod error;
mod event;
mod evict;
mod hash;
mod insert;
mod key;
mod lock;
mod order;
mod page;
mod path;
mod policy;
mod pool;
mod tokens;
mod trailing;
mod tree;
mod version;

pub use arena::NodeHandle;
pub use cache::{PoolCounts, RadixCache};
pub use config::{CacheConfig, Component, ComponentConfig, EvictionPolicy, Retention};
pub use error::CacheError;
pub use event::{BlockHash, EventBatch, KvEvent, Medium};
pub use hash::{block_hash, page_hashes, PageHash};
pub use insert::{InsertOptions, Inserted, InsertedTail, Replaced, TailPages};
pub use key::Namespace;
pub use lock::Receipt;
pub use page::PageId;
pub use tree::Match;
