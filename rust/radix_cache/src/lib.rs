//! Paged radix prefix cache for LLM servers.
//!
//! [`RadixCache`] answers which token prefixes have their KV cached, on which pages, and who uses
//! them. It owns the page numbers: a page is free, held by a caller (between
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
//!
//! # Components
//!
//! FULL pages decide how far a key is cached. A [`CacheConfig`] may add components that only the
//! end of a prefix needs, such as the KV of sliding-window layers; a hit then ends where all have
//! their data.
//!
//! ```
//! use dsserve_radix_cache::{
//!     CacheConfig, Component, ComponentConfig, InsertOptions, Namespace, RadixCache, Retention,
//!     TailPages,
//! };
//!
//! let window = ComponentConfig::new(Retention::Trailing(4), 2, 8);
//! let config = CacheConfig::new(2, 8).with_component(Component::Window, window);
//! let mut cache = RadixCache::new(config)?;
//! let namespace = Namespace::default();
//! let (mut pages, mut tail) = (Vec::new(), Vec::new());
//! assert!(cache.allocate(3, &mut pages));
//! assert!(cache.allocate_component(Component::Window, 2, &mut tail)?);
//!
//! let tails = [TailPages { component: Component::Window, pages: &tail }];
//! let options = InsertOptions::default().with_tails(&tails);
//! cache.insert_with(&namespace, &[1, 2, 3, 4, 5, 6], &pages, options)?;
//!
//! let whole = cache.match_prefix(&namespace, &[1, 2, 3, 4, 5, 6, 7]);
//! assert_eq!(whole.cached_len, 6);
//! let part = cache.match_prefix(&namespace, &[1, 2, 3, 4, 9]);
//! assert_eq!((part.cached_len, part.full_len), (0, 4), "no window data before token 4");
//! # Ok::<(), dsserve_radix_cache::CacheError>(())
//! ```
//!
//! # Events
//!
//! ```
//! use dsserve_radix_cache::{CacheConfig, KvEvent, Namespace, RadixCache};
//!
//! let mut cache = RadixCache::new(CacheConfig::new(2, 8).with_events(1000))?;
//! let mut pages = Vec::new();
//! assert!(cache.allocate(1, &mut pages));
//! cache.insert(&Namespace::default(), &[1, 2], &pages)?;
//!
//! let batch = cache.take_events(1_000_000).expect("something was stored");
//! assert_eq!(batch.sequence, 0);
//! assert!(matches!(batch.events[..], [KvEvent::BlockStored { .. }]));
//! assert_eq!(cache.replay_events(0), Some(vec![batch]), "for a reader that missed it");
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
mod run;
mod tier;
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
pub use tier::Residence;
pub use tree::Match;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
