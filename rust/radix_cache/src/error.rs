//! What can go wrong: one error type for the crate.

use thiserror::Error;

use crate::config::Component;
use crate::page::PageId;

/// Why the cache refused an operation, or what [`check_invariants`] found broken.
///
/// [`check_invariants`]: crate::RadixCache::check_invariants
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CacheError {
    /// A field of [`CacheConfig`](crate::CacheConfig) has a value that cannot work.
    #[error("{field} = {value} is not valid: it must be {requirement}")]
    InvalidConfig {
        /// Name of the field.
        field: &'static str,
        /// The value given.
        value: u64,
        /// What would be valid.
        requirement: &'static str,
    },
    /// An insert whose tokens do not fill its pages exactly.
    #[error("{num_tokens} tokens do not fill {num_pages} pages of {page_size} tokens exactly")]
    PageMismatch {
        /// Tokens given.
        num_tokens: usize,
        /// Pages given.
        num_pages: usize,
        /// Tokens a page holds.
        page_size: u32,
    },
    /// A page that the caller does not hold: it is free, in the tree, given twice or out of range.
    #[error("page {page} is not held by the caller")]
    PageNotHeld {
        /// The offending page.
        page: PageId,
    },
    /// A handle whose node was evicted or flushed.
    #[error("node handle {index} (generation {generation}) is stale")]
    StaleHandle {
        /// Index of the node.
        index: u32,
        /// Generation that the handle expected.
        generation: u32,
    },
    /// A start node that does not lie on the path of the key.
    #[error("the start node ends after {node_pages} pages, on a path other than the key's")]
    NotOnPath {
        /// Pages from the root to the end of the node.
        node_pages: u32,
    },
    /// A component that the tree does not hold (or a tail of it given twice).
    #[error("the tree holds no data of component {}", component.name())]
    NoComponent {
        /// The component asked for.
        component: Component,
    },
    /// A tail that covers more than the key.
    #[error("{num_pages} {} pages for a key that takes {most}", component.name())]
    TailMismatch {
        /// The component of the tail.
        component: Component,
        /// Pages given.
        num_pages: usize,
        /// Pages that cover the whole key.
        most: usize,
    },
    /// A flush while receipts are live.
    #[error("{num_receipts} receipts hold {num_pages} pages of the cache")]
    Locked {
        /// Receipts that were not given back yet.
        num_receipts: u32,
        /// Pages they lock.
        num_pages: u32,
    },
    /// A recount that differs from what the cache believed: a bug in this crate or in its caller.
    #[error("invariant broken: {what}: recorded {recorded}, recounted {recounted}")]
    Inconsistent {
        /// The quantity.
        what: &'static str,
        /// The recorded value.
        recorded: u64,
        /// The value that the recount gave.
        recounted: u64,
    },
}
