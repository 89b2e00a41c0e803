//! How a tokenizer is loaded.

/// Which code encodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// The fast encoder where it knows the file's split pattern, else the reference.
    #[default]
    Auto,
    /// The reference, the `tokenizers` crate.
    HuggingFace,
    /// The fast encoder; a file that it does not know is refused.
    Fast,
}

/// How a tokenizer is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenizerOptions {
    /// Threads that encode; with 1 or less everything runs on the caller's thread.
    pub num_threads: usize,
    /// Which code encodes.
    pub backend: Backend,
    /// Limit of the cache of encoded messages; 0 switches it off. The fast encoder alone has one.
    pub cache_bytes: usize,
}

impl Default for TokenizerOptions {
    /// One thread, [`Backend::Auto`], no cache.
    fn default() -> Self {
        Self {
            num_threads: 1,
            backend: Backend::Auto,
            cache_bytes: 0,
        }
    }
}

impl TokenizerOptions {
    /// The same with this many threads.
    #[must_use]
    pub fn with_threads(mut self, num_threads: usize) -> Self {
        self.num_threads = num_threads;
        self
    }

    /// The same with this backend.
    #[must_use]
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// The same with this limit of the cache of encoded messages.
    #[must_use]
    pub fn with_cache_bytes(mut self, cache_bytes: usize) -> Self {
        self.cache_bytes = cache_bytes;
        self
    }
}
