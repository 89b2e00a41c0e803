//! Several prompts in one call: what a scheduler step asks of the cache.
//! (`PyO3` takes the methods of a class from one block, so these are called from there.)
use dsserve_radix_cache as core;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{from_cache, replaced_pages, unlocked, CacheNode, InsertedPages, Pages, RadixCache};
use crate::errors::guard;

pub(super) type Prompts<'py> = Vec<PyReadonlyArray1<'py, u32>>;

fn slices<'a>(arrays: &'a [PyReadonlyArray1<'_, u32>]) -> PyResult<Vec<&'a [u32]>> {
    let slices = arrays.iter().map(|array| Ok(array.as_slice()?));
    slices.collect()
}

fn num_tokens(prompts: &[&[u32]]) -> usize {
    prompts.iter().map(|prompt| prompt.len()).sum()
}

impl RadixCache {
    /// `match_prefix` of each prompt, in order; returns the cached lengths, the nodes, and the pages
    /// of all one after the other.
    pub(super) fn match_batch_core<'py>(
        &mut self,
        py: Python<'py>,
        name: &core::Namespace,
        prompts: &[PyReadonlyArray1<'py, u32>],
    ) -> PyResult<(Pages<'py>, Vec<CacheNode>, Pages<'py>)> {
        let prompts = slices(prompts)?;
        let cache = &mut self.cache;
        let (mut lens, mut nodes, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        guard(|| {
            unlocked(py, num_tokens(&prompts), || {
                for tokens in &prompts {
                    let found = cache.match_prefix(name, tokens);
                    lens.push(found.cached_len);
                    nodes.push(found.node);
                    pages.extend_from_slice(&found.pages);
                }
            });
            Ok(())
        })?;
        let nodes = nodes.into_iter().map(CacheNode).collect();
        Ok((
            PyArray1::from_vec(py, lens),
            nodes,
            PyArray1::from_vec(py, pages),
        ))
    }

    /// `match_dry_run` of each prompt.
    pub(super) fn match_dry_run_batch_core<'py>(
        &self,
        py: Python<'py>,
        name: &core::Namespace,
        prompts: &[PyReadonlyArray1<'py, u32>],
    ) -> PyResult<Pages<'py>> {
        let prompts = slices(prompts)?;
        let cache = &self.cache;
        let lens = guard(|| {
            let find = || -> Vec<u32> {
                let lens = prompts.iter();
                lens.map(|tokens| cache.match_dry_run(name, tokens))
                    .collect()
            };
            Ok(unlocked(py, num_tokens(&prompts), find))
        })?;
        Ok(PyArray1::from_vec(py, lens))
    }

    /// `insert` of each prompt, in order. An error leaves those before it inserted.
    pub(super) fn insert_batch_core<'py>(
        &mut self,
        py: Python<'py>,
        name: &core::Namespace,
        prompts: &[PyReadonlyArray1<'py, u32>],
        pages: &[PyReadonlyArray1<'py, u32>],
        starts: Option<&[PyRef<'py, CacheNode>]>,
    ) -> PyResult<Vec<InsertedPages>> {
        let (prompts, pages) = (slices(prompts)?, slices(pages)?);
        let starts = starts.map(|starts| starts.iter().map(|start| start.0).collect::<Vec<_>>());
        let num_starts = starts.as_ref().map_or(prompts.len(), Vec::len);
        if pages.len() != prompts.len() || num_starts != prompts.len() {
            let message = "prompts, pages and starts must have the same length";
            return Err(PyValueError::new_err(message));
        }
        let cache = &mut self.cache;
        let insert = || -> Result<Vec<core::Inserted>, core::CacheError> {
            let rows = prompts.iter().zip(&pages).enumerate();
            rows.map(|(number, (tokens, row))| match &starts {
                Some(starts) => cache.insert_at(name, starts[number], tokens, row),
                None => cache.insert(name, tokens, row),
            })
            .collect()
        };
        let inserted = guard(|| Ok(unlocked(py, num_tokens(&prompts), insert)))?;
        let inserted = inserted.map_err(|error| from_cache(&error))?;
        let outcome = |one: core::Inserted| {
            let replaced = replaced_pages(&one.replaced);
            (CacheNode(one.node), one.reused_len, replaced)
        };
        Ok(inserted.into_iter().map(outcome).collect())
    }

    /// Locks prefixes; returns the numbers of the receipts. An error locks none.
    pub(super) fn lock_batch_core(&mut self, nodes: &[PyRef<'_, CacheNode>]) -> PyResult<Vec<u64>> {
        let mut receipts = Vec::with_capacity(nodes.len());
        for node in nodes {
            match guard(|| Ok(self.cache.lock(node.0)))? {
                Ok(receipt) => receipts.push(self.keep(receipt)),
                Err(error) => {
                    self.unlock_batch_core(receipts)?;
                    return Err(from_cache(&error));
                }
            }
        }
        Ok(receipts)
    }

    /// Gives receipts back, in order.
    pub(super) fn unlock_batch_core(&mut self, receipts: Vec<u64>) -> PyResult<()> {
        for number in receipts {
            let receipt = self.give_back(number)?;
            guard(|| {
                self.cache.unlock(receipt);
                Ok(())
            })?;
        }
        Ok(())
    }
}
