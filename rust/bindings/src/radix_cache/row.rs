//! Pages of all components in one array: one allocation and one insert, whatever the tree holds.
//! (`PyO3` takes the methods of a class from one block, so these are called from there.)
use dsserve_radix_cache as core;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{from_cache, names, replaced_pages, CacheNode, InsertedTails, Pages, RadixCache};
use super::{CacheError, ReplacedPages};
use crate::errors::guard;

/// Components with a number of pages, in the order of the dict.
type Counts = Vec<(core::Component, u32)>;

fn counts(dict: &Bound<'_, PyDict>, with_full: bool) -> PyResult<Counts> {
    let entry = |(name, count): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let name: &str = name.extract()?;
        let component = if with_full && name == core::Component::Full.name() {
            core::Component::Full
        } else {
            names::component(name)?
        };
        Ok((component, count.extract()?))
    };
    dict.iter().map(entry).collect()
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
    /// Pages of several components, one after the other; `None` if one has too few.
    pub(super) fn allocate_row_core<'py>(
        &mut self,
        py: Python<'py>,
        wanted: &Bound<'py, PyDict>,
    ) -> PyResult<Option<Pages<'py>>> {
        let wanted = counts(wanted, true)?;
        let mut pages = Vec::new();
        let is_done = guard(|| {
            let done = self.cache.allocate_all(&wanted, &mut pages);
            done.map_err(|error| from_cache(&error))
        })?;
        Ok(is_done.then(|| PyArray1::from_vec(py, pages)))
    }

    /// Inserts a row of FULL pages with the pages of other components behind them.
    pub(super) fn insert_row_core<'py>(
        &mut self,
        py: Python<'py>,
        name: &core::Namespace,
        tokens: &[u32],
        row: &[u32],
        tails: &Bound<'py, PyDict>,
        options: core::InsertOptions<'_>,
    ) -> PyResult<(CacheNode, u32, ReplacedPages, InsertedTails)> {
        let counts = counts(tails, false)?;
        let num_tail_pages: usize = counts.iter().map(|(_, count)| *count as usize).sum();
        let Some(num_full) = row.len().checked_sub(num_tail_pages) else {
            let message = format!(
                "the row has {} pages, its tails {num_tail_pages}",
                row.len()
            );
            return Err(CacheError::new_err(message));
        };
        let (pages, mut rest) = row.split_at(num_full);
        let mut brought = Vec::with_capacity(counts.len());
        for (component, count) in counts {
            let (pages, behind) = rest.split_at(count as usize);
            brought.push(core::TailPages { component, pages });
            rest = behind;
        }
        let options = options.with_tails(&brought);
        let inserted = self.insert_core(py, name, tokens, pages, options)?;
        Ok(outcome(&inserted))
    }
}
