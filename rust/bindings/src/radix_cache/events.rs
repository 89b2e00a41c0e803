//! KV events as Python dictionaries, one a event.
use dsserve_radix_cache as core;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::RadixCache;
use crate::errors::guard;

/// `(sequence, timestamp_us, events)`.
pub(super) type Batch<'py> = (u64, u64, Bound<'py, PyList>);

fn event<'py>(py: Python<'py>, event: &core::KvEvent) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    match event {
        core::KvEvent::BlockStored {
            block_hashes,
            parent_block_hash,
            token_ids,
            block_size,
            medium,
            namespace,
            trailing_ok,
        } => {
            fields.set_item("type", "BlockStored")?;
            fields.set_item("block_hashes", block_hashes)?;
            fields.set_item("parent_block_hash", parent_block_hash)?;
            fields.set_item("token_ids", PyArray1::from_slice(py, token_ids))?;
            fields.set_item("block_size", block_size)?;
            fields.set_item("lora_id", namespace.adapter.as_deref())?;
            fields.set_item("medium", medium.name())?;
            fields.set_item("extra_key", namespace.extra_key.as_deref())?;
            fields.set_item("cache_salt", namespace.cache_salt.as_deref())?;
            fields.set_item("trailing_ok", trailing_ok.as_deref())?;
        }
        core::KvEvent::BlockRemoved {
            block_hashes,
            medium,
        } => {
            fields.set_item("type", "BlockRemoved")?;
            fields.set_item("block_hashes", block_hashes)?;
            fields.set_item("medium", medium.name())?;
        }
        _ => fields.set_item("type", "AllBlocksCleared")?,
    }
    Ok(fields)
}

fn events<'py>(py: Python<'py>, all: &[core::KvEvent]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for one in all {
        list.append(event(py, one)?)?;
    }
    Ok(list)
}

fn batch<'py>(py: Python<'py>, batch: &core::EventBatch) -> PyResult<Batch<'py>> {
    let events = events(py, &batch.events)?;
    Ok((batch.sequence, batch.timestamp_us, events))
}

impl RadixCache {
    /// Closes the batch of events since the last call; `None` if there were none.
    pub(super) fn take_events_core<'py>(
        &mut self,
        py: Python<'py>,
        timestamp_us: u64,
    ) -> PyResult<Option<Batch<'py>>> {
        let taken = guard(|| Ok(self.cache.take_events(timestamp_us)))?;
        taken.map(|taken| batch(py, &taken)).transpose()
    }

    /// The kept batches from a number on, or `None` if one of them is not kept any more.
    pub(super) fn replay_events_core<'py>(
        &self,
        py: Python<'py>,
        sequence: u64,
    ) -> PyResult<Option<Vec<Batch<'py>>>> {
        let kept = guard(|| Ok(self.cache.replay_events(sequence)))?;
        let kept = kept.map(|kept| kept.iter().map(|one| batch(py, one)).collect());
        kept.transpose()
    }

    /// Events that lead from nothing to what is cached now.
    pub(super) fn snapshot_events_core<'py>(
        &mut self,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyList>> {
        let all = guard(|| Ok(self.cache.snapshot_events()))?;
        events(py, &all)
    }
}
