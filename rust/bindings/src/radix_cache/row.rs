//! Pages of all components in one array: one allocation and one insert, whatever the tree holds.
//! (`PyO3` takes the methods of a class from one block, so these are called from there.)
use dsserve_radix_cache as core;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{from_cache, names, replaced_pages, CacheNode, InsertedTails, Pages, RadixCache};
use super::{CacheError, ReplacedPages};
use crate::errors::guard;

/// How many pages of each component cover the end of a prompt: made once, used by every call.
#[pyclass(frozen, module = "dsserve._native")]
pub struct CacheTails {
    counts: Vec<(core::Component, u32)>,
    num_pages: usize,
}

#[pymethods]
impl CacheTails {
    #[new]
    fn new(counts: &Bound<'_, PyDict>) -> PyResult<Self> {
        let entry = |(name, count): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            Ok((names::component(name.extract()?)?, count.extract()?))
        };
        let counts = counts.iter().map(entry).collect::<PyResult<Vec<_>>>()?;
        let num_pages = counts.iter().map(|(_, count)| *count as usize).sum();
        Ok(Self { counts, num_pages })
    }
}

/// `(node, reused_len, replaced, tails)` of an insert.
pub(super) fn outcome(inserted: &core::Inserted) -> (CacheNode, u32, ReplacedPages, InsertedTails) {
    let tails = inserted.tails.iter().map(|tail| {
        let replaced = replaced_pages(&tail.replaced);
        (tail.component.name(), tail.num_kept, replaced)
    });
    (
        CacheNode(inserted.node),
        inserted.reused_len,
        replaced_pages(&inserted.replaced),
        tails.collect(),
    )
}

impl RadixCache {
    /// FULL pages and those of other components, one after the other; `None` if there are too few.
    pub(super) fn allocate_row_core<'py>(
        &mut self,
        py: Python<'py>,
        count: u32,
        tails: &CacheTails,
    ) -> PyResult<Option<Pages<'py>>> {
        let mut pages = Vec::new(); // the count is checked against the pools first
        let cache = &mut self.cache;
        let is_done = guard(|| {
            if !cache.allocate(count, &mut pages) {
                return Ok(false);
            }
            let is_done = cache.allocate_all(&tails.counts, &mut pages);
            if !matches!(is_done, Ok(true)) {
                cache.free(&pages);
            }
            is_done.map_err(|error| from_cache(&error))
        })?;
        Ok(is_done.then(|| PyArray1::from_vec(py, pages)))
    }

    /// Inserts a row of FULL pages with the pages of other components behind them.
    pub(super) fn insert_row_core(
        &mut self,
        py: Python<'_>,
        name: &core::Namespace,
        tokens: &[u32],
        row: &[u32],
        tails: &CacheTails,
        options: core::InsertOptions<'_>,
    ) -> PyResult<(CacheNode, u32, ReplacedPages, InsertedTails)> {
        let Some(num_full) = row.len().checked_sub(tails.num_pages) else {
            let (given, needed) = (row.len(), tails.num_pages);
            let message = format!("the row has {given} pages, its tails {needed}");
            return Err(CacheError::new_err(message));
        };
        let (pages, mut rest) = row.split_at(num_full);
        let mut brought = Vec::with_capacity(tails.counts.len());
        for &(component, count) in &tails.counts {
            let (pages, behind) = rest.split_at(count as usize);
            brought.push(core::TailPages { component, pages });
            rest = behind;
        }
        let options = options.with_tails(&brought);
        let inserted = self.insert_core(py, name, tokens, pages, options)?;
        Ok(outcome(&inserted))
    }
}
