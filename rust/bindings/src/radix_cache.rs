//! `RadixCache` for Python: property tests and benchmarks of the tree, not the serving path.
#![expect(
    clippy::needless_pass_by_value,
    reason = "array arguments are extracted by value"
)]
use std::collections::HashMap;

use dsserve_radix_cache as core;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::errors::guard;

create_exception!(
    dsserve._native,
    CacheError,
    PyException,
    "A wrong call of the radix cache, or an invariant that does not hold."
);

fn from_cache(error: &core::CacheError) -> PyErr {
    CacheError::new_err(error.to_string())
}

/// A cached prefix; stale once it was evicted.
#[pyclass(frozen, module = "dsserve._native")]
pub struct CacheNode(core::NodeHandle);

/// What must agree besides the tokens; the empty string differs from `None`.
#[pyclass(frozen, module = "dsserve._native")]
pub struct CacheNamespace(core::Namespace);

#[pymethods]
impl CacheNamespace {
    #[new]
    #[pyo3(signature = (*, model_generation = 0, extra_key = None, cache_salt = None, adapter = None))]
    fn new(
        model_generation: u64,
        extra_key: Option<String>,
        cache_salt: Option<String>,
        adapter: Option<String>,
    ) -> Self {
        Self(core::Namespace {
            model_generation,
            extra_key,
            cache_salt,
            adapter,
        })
    }
}

/// The radix tree with its FULL page pool. Tokens and pages are contiguous uint32 arrays.
#[pyclass(module = "dsserve._native")]
pub struct RadixCache {
    cache: core::RadixCache,
    /// Python cannot hold a linear value: it gets a number instead.
    receipts: HashMap<u64, core::Receipt>,
    next_receipt: u64,
}

type Pages<'py> = Bound<'py, PyArray1<u32>>;

/// `(page_index, own, tree)` each.
type ReplacedPages = Vec<(u32, u32, u32)>;

#[pymethods]
impl RadixCache {
    #[new]
    #[pyo3(signature = (*, page_size, num_pages, enabled = true))]
    fn new(page_size: u32, num_pages: u32, enabled: bool) -> PyResult<Self> {
        let config = core::CacheConfig::new(page_size, num_pages).with_enabled(enabled);
        Ok(Self {
            cache: core::RadixCache::new(config).map_err(|error| from_cache(&error))?,
            receipts: HashMap::new(),
            next_receipt: 0,
        })
    }

    /// Returns `(cached_len, node, pages)` of the longest cached prefix.
    fn match_prefix<'py>(
        &mut self,
        py: Python<'py>,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'py, u32>,
    ) -> PyResult<(u32, CacheNode, Pages<'py>)> {
        let tokens = tokens.as_slice()?;
        let found = guard(|| Ok(self.cache.match_prefix(&namespace.0, tokens)))?;
        let pages = PyArray1::from_vec(py, found.pages);
        Ok((found.cached_len, CacheNode(found.node), pages))
    }

    /// Returns the `cached_len` of a match without marking anything as used.
    fn match_dry_run(
        &self,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<u32> {
        let tokens = tokens.as_slice()?;
        guard(|| Ok(self.cache.match_dry_run(&namespace.0, tokens)))
    }

    /// Returns `(node, reused_len, replaced)`; `replaced` has `(page_index, own, tree)` each.
    #[pyo3(signature = (namespace, tokens, pages, *, start = None))]
    fn insert(
        &mut self,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'_, u32>,
        pages: PyReadonlyArray1<'_, u32>,
        start: Option<&CacheNode>,
    ) -> PyResult<(CacheNode, u32, ReplacedPages)> {
        let (name, tokens, pages) = (&namespace.0, tokens.as_slice()?, pages.as_slice()?);
        let inserted = guard(|| {
            let result = match start {
                Some(start) => self.cache.insert_at(name, start.0, tokens, pages),
                None => self.cache.insert(name, tokens, pages),
            };
            result.map_err(|error| from_cache(&error))
        })?;
        let replaced = inserted.replaced.iter();
        let replaced = replaced.map(|page| (page.page_index, page.own, page.tree));
        let node = CacheNode(inserted.node);
        Ok((node, inserted.reused_len, replaced.collect()))
    }

    /// Locks a prefix; returns the number of the receipt.
    fn lock(&mut self, node: &CacheNode) -> PyResult<u64> {
        let locked = guard(|| self.cache.lock(node.0).map_err(|error| from_cache(&error)));
        let number = self.next_receipt;
        self.receipts.insert(number, locked?);
        self.next_receipt += 1;
        Ok(number)
    }

    /// Gives a receipt back, once.
    fn unlock(&mut self, receipt: u64) -> PyResult<()> {
        let Some(receipt) = self.receipts.remove(&receipt) else {
            return Err(CacheError::new_err(format!(
                "receipt {receipt} does not exist or was given back"
            )));
        };
        guard(|| {
            self.cache.unlock(receipt);
            Ok(())
        })
    }

    /// Returns `count` free pages, or `None` if there are fewer.
    fn allocate<'py>(&mut self, py: Python<'py>, count: u32) -> PyResult<Option<Pages<'py>>> {
        let mut pages = Vec::new();
        let is_done = guard(|| Ok(self.cache.allocate(count, &mut pages)))?;
        Ok(is_done.then(|| PyArray1::from_vec(py, pages)))
    }

    /// Takes held pages back.
    fn free(&mut self, pages: PyReadonlyArray1<'_, u32>) -> PyResult<()> {
        let pages = pages.as_slice()?;
        guard(|| {
            let freed = self.cache.try_free(pages);
            freed.map_err(|error| from_cache(&error))
        })
    }

    /// Evicts at least `count` pages if it can; returns how many.
    fn evict(&mut self, count: u32) -> PyResult<u32> {
        guard(|| Ok(self.cache.evict(count)))
    }

    /// Empties the tree; returns the pages freed. Raises while anything is locked.
    fn flush(&mut self) -> PyResult<u32> {
        guard(|| self.cache.flush().map_err(|error| from_cache(&error)))
    }

    /// Recounts everything; raises if something differs.
    fn check_invariants(&self) -> PyResult<()> {
        let checked = guard(|| Ok(self.cache.check_invariants()))?;
        checked.map_err(|error| from_cache(&error))
    }

    /// Returns the chained SHA-256 of each whole page.
    fn page_hashes(
        &self,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<Vec<[u8; 32]>> {
        let tokens = tokens.as_slice()?;
        guard(|| Ok(self.cache.page_hashes(&namespace.0, tokens)))
    }

    /// All usable pages.
    #[getter]
    fn num_pages(&self) -> u32 {
        self.cache.num_pages()
    }

    /// Pages in the free list.
    #[getter]
    fn num_free(&self) -> u32 {
        self.cache.num_free()
    }

    /// Pages in the tree that nobody locks.
    #[getter]
    fn num_evictable(&self) -> u32 {
        self.cache.num_evictable()
    }

    /// Pages in the tree under a lock.
    #[getter]
    fn num_locked(&self) -> u32 {
        self.cache.num_locked()
    }

    /// Pages handed out and neither freed nor inserted.
    #[getter]
    fn num_held(&self) -> u32 {
        self.cache.num_held()
    }
}

impl Drop for RadixCache {
    fn drop(&mut self) {
        for (_, receipt) in self.receipts.drain() {
            receipt.abandon();
        }
    }
}
