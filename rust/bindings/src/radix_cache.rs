//! `RadixCache` for Python: property tests and benchmarks of the tree, not the serving path.
#![expect(
    clippy::needless_pass_by_value,
    reason = "array arguments are extracted by value"
)]
use std::collections::HashMap;

mod batch;
mod events;
mod names;
mod row;

use dsserve_radix_cache as core;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

pub use self::names::{CacheNamespace, CacheNode};
pub use self::row::CacheTails;

use self::batch::Prompts;
use self::events::Batch;
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

/// Calls on fewer tokens are over before another thread could use the interpreter lock.
const TOKENS_WORTH_DETACHING: usize = 32_768;

/// Runs `body`, without the interpreter lock if it works on many tokens.
fn unlocked<T: Send>(py: Python<'_>, num_tokens: usize, body: impl FnOnce() -> T + Send) -> T {
    if num_tokens < TOKENS_WORTH_DETACHING {
        return body();
    }
    py.detach(body)
}

/// The radix tree with its page pools. Tokens and pages are contiguous uint32 arrays, which must not
/// be written during a call.
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

/// `(node, reused_len, replaced)`.
type InsertedPages = (CacheNode, u32, ReplacedPages);

/// `(component, num_kept, replaced)` each.
type InsertedTails = Vec<(&'static str, u32, ReplacedPages)>;

fn replaced_pages(replaced: &[core::Replaced]) -> ReplacedPages {
    let pages = replaced.iter();
    pages
        .map(|page| (page.page_index, page.own, page.tree))
        .collect()
}

#[pymethods]
impl RadixCache {
    #[new]
    #[pyo3(signature = (*, page_size, num_pages, enabled = true, policy = "lru", components = None, event_batches = None))]
    fn new(
        page_size: u32,
        num_pages: u32,
        enabled: bool,
        policy: &str,
        components: Option<&Bound<'_, PyDict>>,
        event_batches: Option<u32>,
    ) -> PyResult<Self> {
        let config = core::CacheConfig::new(page_size, num_pages).with_enabled(enabled);
        let config = config.with_policy(names::policy(policy)?);
        let mut config = names::with_components(config, components)?;
        if let Some(num_batches) = event_batches {
            config = config.with_events(num_batches);
        }
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
        let (name, tokens) = (&namespace.0, tokens.as_slice()?);
        let cache = &mut self.cache;
        let found = guard(|| {
            let find = || cache.match_prefix(name, tokens);
            Ok(unlocked(py, tokens.len(), find))
        })?;
        let pages = PyArray1::from_vec(py, found.pages);
        Ok((found.cached_len, CacheNode(found.node), pages))
    }

    /// Returns the `cached_len` of a match without marking anything as used.
    fn match_dry_run(
        &self,
        py: Python<'_>,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<u32> {
        let (name, tokens) = (&namespace.0, tokens.as_slice()?);
        let cache = &self.cache;
        guard(|| {
            let find = || cache.match_dry_run(name, tokens);
            Ok(unlocked(py, tokens.len(), find))
        })
    }

    /// Returns `(node, reused_len, replaced)`; `replaced` has `(page_index, own, tree)` each.
    #[pyo3(signature = (namespace, tokens, pages, *, start = None, priority = None))]
    fn insert(
        &mut self,
        py: Python<'_>,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'_, u32>,
        pages: PyReadonlyArray1<'_, u32>,
        start: Option<&CacheNode>,
        priority: Option<i32>,
    ) -> PyResult<InsertedPages> {
        let (name, tokens, pages) = (&namespace.0, tokens.as_slice()?, pages.as_slice()?);
        let mut options = core::InsertOptions::default();
        options.from = start.map(|start| start.0);
        options.priority = priority;
        let inserted = self.insert_core(py, name, tokens, pages, options)?;
        let replaced = replaced_pages(&inserted.replaced);
        Ok((CacheNode(inserted.node), inserted.reused_len, replaced))
    }

    /// Like `insert` with data of other components for the end of the key, by name; also returns
    /// `(component, num_kept, replaced)` where some pages stay the caller's.
    #[pyo3(signature = (namespace, tokens, pages, tails, *, start = None, priority = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn insert_tails<'py>(
        &mut self,
        py: Python<'py>,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'py, u32>,
        pages: PyReadonlyArray1<'py, u32>,
        tails: &Bound<'py, PyDict>,
        start: Option<&CacheNode>,
        priority: Option<i32>,
    ) -> PyResult<(CacheNode, u32, ReplacedPages, InsertedTails)> {
        let (name, tokens, pages) = (&namespace.0, tokens.as_slice()?, pages.as_slice()?);
        let mut arrays = Vec::with_capacity(tails.len());
        for (component, pages) in tails {
            let component = names::component(component.extract()?)?;
            arrays.push((component, pages.extract::<PyReadonlyArray1<'py, u32>>()?));
        }
        let mut brought = Vec::with_capacity(arrays.len());
        for (component, pages) in &arrays {
            brought.push(core::TailPages {
                component: *component,
                pages: pages.as_slice()?,
            });
        }
        let mut options = core::InsertOptions::default().with_tails(&brought);
        options.from = start.map(|start| start.0);
        options.priority = priority;
        let inserted = self.insert_core(py, name, tokens, pages, options)?;
        Ok(row::outcome(&inserted))
    }

    /// Like `insert_tails` with all pages in one array: the FULL ones, then those of `tails`.
    #[pyo3(signature = (namespace, tokens, row, tails, *, start = None, priority = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn insert_row<'py>(
        &mut self,
        py: Python<'py>,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'py, u32>,
        row: PyReadonlyArray1<'py, u32>,
        tails: &CacheTails,
        start: Option<&CacheNode>,
        priority: Option<i32>,
    ) -> PyResult<(CacheNode, u32, ReplacedPages, InsertedTails)> {
        let (tokens, row) = (tokens.as_slice()?, row.as_slice()?);
        let mut options = core::InsertOptions::default();
        options.from = start.map(|start| start.0);
        options.priority = priority;
        self.insert_row_core(py, &namespace.0, tokens, row, tails, options)
    }

    /// Returns the pages that a component has for the end of a prefix.
    fn tail_pages<'py>(
        &self,
        py: Python<'py>,
        node: &CacheNode,
        component: &str,
    ) -> PyResult<Pages<'py>> {
        let component = names::component(component)?;
        let mut pages = Vec::new();
        let found = guard(|| {
            let found = self.cache.tail_pages(node.0, component, &mut pages);
            found.map_err(|error| from_cache(&error))
        });
        found?;
        Ok(PyArray1::from_vec(py, pages))
    }

    /// Locks a prefix; returns the number of the receipt.
    fn lock(&mut self, node: &CacheNode) -> PyResult<u64> {
        let locked = guard(|| self.cache.lock(node.0).map_err(|error| from_cache(&error)));
        Ok(self.keep(locked?))
    }

    /// Gives up a receipt's hold on components besides FULL.
    fn release_window(&mut self, receipt: u64) -> PyResult<()> {
        let taken = self.give_back(receipt)?;
        let taken = guard(|| Ok(self.cache.release_window(taken)))?;
        self.receipts.insert(receipt, taken);
        Ok(())
    }

    /// Gives a receipt back, once.
    fn unlock(&mut self, receipt: u64) -> PyResult<()> {
        let receipt = self.give_back(receipt)?;
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
    fn evict(&mut self, py: Python<'_>, count: u32) -> PyResult<u32> {
        let num_tokens = count as usize * self.cache.config().page_size as usize;
        let cache = &mut self.cache;
        guard(|| Ok(unlocked(py, num_tokens, || cache.evict(count))))
    }

    /// Like `allocate`, `free` and `evict` for a component by name.
    fn allocate_component<'py>(
        &mut self,
        py: Python<'py>,
        component: &str,
        count: u32,
    ) -> PyResult<Option<Pages<'py>>> {
        let component = names::component(component)?;
        let mut pages = Vec::new();
        let is_done = guard(|| {
            let done = self.cache.allocate_component(component, count, &mut pages);
            done.map_err(|error| from_cache(&error))
        })?;
        Ok(is_done.then(|| PyArray1::from_vec(py, pages)))
    }

    /// Like `allocate` with the pages of `tails` behind the FULL ones.
    fn allocate_row<'py>(
        &mut self,
        py: Python<'py>,
        count: u32,
        tails: &CacheTails,
    ) -> PyResult<Option<Pages<'py>>> {
        self.allocate_row_core(py, count, tails)
    }

    /// Takes held pages of a component back.
    fn free_component(
        &mut self,
        component: &str,
        pages: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<()> {
        let (component, pages) = (names::component(component)?, pages.as_slice()?);
        guard(|| {
            let freed = self.cache.free_component(component, pages);
            freed.map_err(|error| from_cache(&error))
        })
    }

    /// Evicts at least `count` pages of a component if it can; returns how many.
    fn evict_component(&mut self, component: &str, count: u32) -> PyResult<u32> {
        let component = names::component(component)?;
        guard(|| {
            let freed = self.cache.evict_component(component, count);
            freed.map_err(|error| from_cache(&error))
        })
    }

    /// Makes what was cached for earlier model generations go before all else.
    fn retire_generations(&mut self, generation: u64) -> PyResult<()> {
        guard(|| {
            self.cache.retire_generations(generation);
            Ok(())
        })
    }

    /// `match_prefix` of each prompt, in order; returns the cached lengths, the nodes, and the pages
    /// of all one after the other.
    fn match_batch<'py>(
        &mut self,
        py: Python<'py>,
        namespace: &CacheNamespace,
        prompts: Prompts<'py>,
    ) -> PyResult<(Pages<'py>, Vec<CacheNode>, Pages<'py>)> {
        self.match_batch_core(py, &namespace.0, &prompts)
    }

    /// `match_dry_run` of each prompt.
    fn match_dry_run_batch<'py>(
        &self,
        py: Python<'py>,
        namespace: &CacheNamespace,
        prompts: Prompts<'py>,
    ) -> PyResult<Pages<'py>> {
        self.match_dry_run_batch_core(py, &namespace.0, &prompts)
    }

    /// `insert` of each prompt, in order. An error leaves those before it inserted.
    #[pyo3(signature = (namespace, prompts, pages, *, starts = None))]
    fn insert_batch<'py>(
        &mut self,
        py: Python<'py>,
        namespace: &CacheNamespace,
        prompts: Prompts<'py>,
        pages: Prompts<'py>,
        starts: Option<Vec<PyRef<'py, CacheNode>>>,
    ) -> PyResult<Vec<InsertedPages>> {
        self.insert_batch_core(py, &namespace.0, &prompts, &pages, starts.as_deref())
    }

    /// Locks prefixes; returns the numbers of the receipts. An error locks none.
    fn lock_batch(&mut self, nodes: Vec<PyRef<'_, CacheNode>>) -> PyResult<Vec<u64>> {
        self.lock_batch_core(&nodes)
    }

    /// Gives receipts back, in order.
    fn unlock_batch(&mut self, receipts: Vec<u64>) -> PyResult<()> {
        self.unlock_batch_core(receipts)
    }

    /// Closes the batch of events since the last call; `None` if there were none.
    fn take_events<'py>(
        &mut self,
        py: Python<'py>,
        timestamp_us: u64,
    ) -> PyResult<Option<Batch<'py>>> {
        self.take_events_core(py, timestamp_us)
    }

    /// The kept batches from a number on, or `None` if one of them is not kept any more.
    fn replay_events<'py>(
        &self,
        py: Python<'py>,
        sequence: u64,
    ) -> PyResult<Option<Vec<Batch<'py>>>> {
        self.replay_events_core(py, sequence)
    }

    /// Events that lead from nothing to what is cached now.
    fn snapshot_events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.snapshot_events_core(py)
    }

    /// Counts by component and owner, receipts, and the number of the next event batch.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        names::stats(py, &self.cache)
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
        py: Python<'_>,
        namespace: &CacheNamespace,
        tokens: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<Vec<[u8; 32]>> {
        let (name, tokens) = (&namespace.0, tokens.as_slice()?);
        let cache = &self.cache;
        guard(|| {
            // A token costs some ten times what it does in a match.
            let hash = || cache.page_hashes(name, tokens);
            Ok(unlocked(py, tokens.len() * 10, hash))
        })
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

impl RadixCache {
    fn insert_core(
        &mut self,
        py: Python<'_>,
        name: &core::Namespace,
        tokens: &[u32],
        pages: &[u32],
        options: core::InsertOptions<'_>,
    ) -> PyResult<core::Inserted> {
        let cache = &mut self.cache;
        guard(|| {
            let insert = || cache.insert_with(name, tokens, pages, options);
            unlocked(py, tokens.len(), insert).map_err(|error| from_cache(&error))
        })
    }

    fn keep(&mut self, receipt: core::Receipt) -> u64 {
        let number = self.next_receipt;
        self.receipts.insert(number, receipt);
        self.next_receipt += 1;
        number
    }

    fn give_back(&mut self, number: u64) -> PyResult<core::Receipt> {
        self.receipts.remove(&number).ok_or_else(|| {
            CacheError::new_err(format!("receipt {number} does not exist or was given back"))
        })
    }
}

impl Drop for RadixCache {
    fn drop(&mut self) {
        for (_, receipt) in self.receipts.drain() {
            receipt.abandon();
        }
    }
}
