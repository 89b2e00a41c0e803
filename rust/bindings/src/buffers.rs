//! Views on caller-owned numpy arrays that plans are written into.
//!
//! The arrays are checked once, at registration, and written only inside `next_plan`, with the
//! interpreter lock held; numpy's borrow checks keep even that free of `unsafe`.
use dsserve_scheduler::{PlanCapacity, StepPlan};
use numpy::{Element, PyArray, PyArrayMethods, PyUntypedArrayMethods};
use numpy::{Ix1, Ix2, PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::SchedulerError;

/// Words of the header.
const HEADER_LEN: usize = 16;

/// One set of plan arrays.
#[derive(Debug)]
pub struct BufferSet {
    header: Py<PyArray1<i64>>,
    request_id: Py<PyArray1<u64>>,
    request_slot: Py<PyArray1<i32>>,
    cu_seqlens: Py<PyArray1<i32>>,
    start_position: Py<PyArray1<i32>>,
    cached_len: Py<PyArray1<i32>>,
    replay_len: Py<PyArray1<i32>>,
    tail_len: Py<PyArray1<i32>>,
    draft_len: Py<PyArray1<i32>>,
    window_floor: Py<PyArray1<i32>>,
    write_floor: Py<PyArray1<i32>>,
    tail_floor: Py<PyArray1<i32>>,
    samples: Py<PyArray1<u8>>,
    history_ids: Py<PyArray2<i32>>,
    token_ids: Py<PyArray1<i32>>,
    positions: Py<PyArray1<i32>>,
    page_deltas: Py<PyArray2<i32>>,
    released_slots: Py<PyArray1<i32>>,
}

/// Where an array comes from, for messages.
struct Source<'a, 'py> {
    arrays: &'a Bound<'py, PyDict>,
    set_index: usize,
}

impl BufferSet {
    /// Checks and keeps the arrays of set `set_index`.
    ///
    /// # Errors
    /// `SchedulerError` naming set, field and what is wrong.
    pub fn register(
        arrays: &Bound<'_, PyDict>,
        set_index: usize,
        capacity: PlanCapacity,
    ) -> PyResult<Self> {
        let source = Source { arrays, set_index };
        let (requests, rows) = (capacity.requests as usize, capacity.rows as usize);
        Ok(Self {
            header: source.vector("header", HEADER_LEN)?,
            request_id: source.vector("request_id", requests)?,
            request_slot: source.vector("request_slot", requests)?,
            cu_seqlens: source.vector("cu_seqlens", requests + 1)?,
            start_position: source.vector("start_position", requests)?,
            cached_len: source.vector("cached_len", requests)?,
            replay_len: source.vector("replay_len", requests)?,
            tail_len: source.vector("tail_len", requests)?,
            draft_len: source.vector("draft_len", requests)?,
            window_floor: source.vector("window_floor", requests)?,
            write_floor: source.vector("write_floor", requests)?,
            tail_floor: source.vector("tail_floor", requests)?,
            samples: source.vector("samples", requests)?,
            history_ids: source.triples("history_ids", requests)?,
            token_ids: source.vector("token_ids", rows)?,
            positions: source.vector("positions", rows)?,
            page_deltas: source.triples("page_deltas", capacity.deltas as usize)?,
            released_slots: source.vector("released_slots", capacity.slots as usize)?,
        })
    }

    /// Writes a plan; entries past its lengths keep what they had.
    ///
    /// # Errors
    /// `SchedulerError` if an array is borrowed or a plan exceeds the capacity (a bug).
    pub fn write(&self, py: Python<'_>, plan: &StepPlan) -> PyResult<()> {
        fill(py, &self.header, &header(plan))?;
        fill(py, &self.request_id, &plan.request_id)?;
        fill(py, &self.request_slot, &plan.request_slot)?;
        fill(py, &self.cu_seqlens, &plan.cu_seqlens)?;
        fill(py, &self.start_position, &plan.start_position)?;
        fill(py, &self.cached_len, &plan.cached_len)?;
        fill(py, &self.replay_len, &plan.replay_len)?;
        fill(py, &self.tail_len, &plan.tail_len)?;
        fill(py, &self.draft_len, &plan.draft_len)?;
        fill(py, &self.window_floor, &plan.window_floor)?;
        fill(py, &self.write_floor, &plan.write_floor)?;
        fill(py, &self.tail_floor, &plan.tail_floor)?;
        fill(py, &self.samples, &plan.samples)?;
        fill(py, &self.history_ids, plan.history_ids.as_flattened())?;
        fill(py, &self.token_ids, &plan.token_ids)?;
        fill(py, &self.positions, &plan.positions)?;
        fill(py, &self.page_deltas, plan.page_deltas.as_flattened())?;
        fill(py, &self.released_slots, &plan.released_slots)
    }
}

fn header(plan: &StepPlan) -> [i64; HEADER_LEN] {
    let totals = &plan.totals;
    let mut header = [0; HEADER_LEN];
    header[0] = i64::try_from(plan.step_id).unwrap_or(i64::MAX);
    header[1] = i64::from(plan.phase as u8);
    header[2] = length(plan.request_id.len());
    header[3] = length(plan.positions.len());
    header[4] = length(plan.page_deltas.len());
    header[5] = i64::from(totals.tail_rows);
    header[6] = length(plan.released_slots.len());
    header[7] = i64::from(totals.sampling_rows);
    header[8] = i64::from(totals.max_computed_len);
    header[9] = i64::from_ne_bytes(plan.digest.to_ne_bytes());
    header[10] = i64::from(plan.group_id);
    header[11] = i64::from(totals.draft_tokens);
    header
}

fn length(len: usize) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

fn fill<T: Element + Copy, D: numpy::ndarray::Dimension>(
    py: Python<'_>,
    array: &Py<PyArray<T, D>>,
    values: &[T],
) -> PyResult<()> {
    let mut borrowed = array
        .bind(py)
        .try_readwrite()
        .map_err(|error| SchedulerError::new_err(format!("a plan array is in use: {error}")))?;
    let slice = borrowed
        .as_slice_mut()
        .map_err(|error| SchedulerError::new_err(format!("a plan array changed: {error}")))?;
    let Some(head) = slice.get_mut(..values.len()) else {
        return Err(SchedulerError::new_err(format!(
            "a plan needs {} entries, its array has {}",
            values.len(),
            slice.len()
        )));
    };
    head.copy_from_slice(values);
    Ok(())
}

impl Source<'_, '_> {
    fn vector<T: Element>(&self, field: &str, len: usize) -> PyResult<Py<PyArray1<T>>> {
        let array = self.array::<T, Ix1>(field)?;
        self.check(field, array.len() >= len, || {
            format!("has {} entries, needs {len}", array.len())
        })?;
        Ok(array.unbind())
    }

    fn triples(&self, field: &str, len: usize) -> PyResult<Py<PyArray2<i32>>> {
        let array = self.array::<i32, Ix2>(field)?;
        let shape = array.shape();
        self.check(field, shape[0] >= len && shape[1] == 3, || {
            format!("has shape {shape:?}, needs [{len}, 3]")
        })?;
        Ok(array.unbind())
    }

    fn array<T: Element, D: numpy::ndarray::Dimension>(
        &self,
        field: &str,
    ) -> PyResult<Bound<'_, PyArray<T, D>>> {
        let value = self.arrays.get_item(field)?;
        let Some(value) = value else {
            return Err(self.error(field, "is missing"));
        };
        let array = value.cast_into::<PyArray<T, D>>().map_err(|error| {
            let dimensions = D::NDIM.unwrap_or(1);
            let message =
                format!("must be a {dimensions}-dimensional array of another type: {error}");
            self.error(field, &message)
        })?;
        self.check(field, array.is_c_contiguous(), || {
            "must be C-contiguous".to_owned()
        })?;
        let writable = array.try_readwrite().is_ok();
        self.check(field, writable, || "must be writable".to_owned())?;
        Ok(array)
    }

    fn check(&self, field: &str, holds: bool, what: impl FnOnce() -> String) -> PyResult<()> {
        if holds {
            Ok(())
        } else {
            Err(self.error(field, &what()))
        }
    }

    fn error(&self, field: &str, what: &str) -> PyErr {
        SchedulerError::new_err(format!("buffer set {}: {field} {what}", self.set_index))
    }
}
