//! The threads that encode, and how much text is worth waking them for.

use crate::error::TokenizerError;
use rayon::prelude::*;

/// Longer texts are cut at safe places and encoded in parallel.
pub const PARALLEL_TEXT_BYTES: usize = 64 * 1024;

/// Less text than this in a batch is not worth waking threads for.
pub(crate) const MIN_PARALLEL_BATCH_BYTES: usize = 4 * 1024;

/// Parts of a long text; small enough to balance, large enough to cost nothing extra.
pub(crate) const PART_BYTES: usize = 16 * 1024;

/// A pool of its own, or the caller's thread alone.
pub(crate) struct Threads(Option<rayon::ThreadPool>);

impl Threads {
    pub(crate) fn start(num_threads: usize) -> Result<Self, TokenizerError> {
        if num_threads <= 1 {
            return Ok(Self(None));
        }
        rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .thread_name(|index| format!("tokenizer-{index}"))
            .build()
            .map(|pool| Self(Some(pool)))
            .map_err(|error| TokenizerError::Threads {
                threads: num_threads,
                reason: error.to_string(),
            })
    }

    pub(crate) fn are_many(&self) -> bool {
        self.0.is_some()
    }

    /// `work` on every item, in order; in parallel if `is_much`.
    pub(crate) fn map<T: Sync, R: Send>(
        &self,
        items: &[T],
        is_much: bool,
        work: impl Fn(&T) -> R + Sync + Send,
    ) -> Vec<R> {
        match &self.0 {
            Some(pool) if is_much && items.len() > 1 => {
                pool.install(|| items.par_iter().with_max_len(1).map(work).collect())
            }
            _ => items.iter().map(work).collect(),
        }
    }
}
