//! Python classes over the scheduler crate: `Scheduler`, `StepSummary`, `StepOutputs`.
#![expect(
    clippy::needless_pass_by_value,
    reason = "arguments are extracted by value"
)]
use dsserve_scheduler as core;
use numpy::{PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::buffers::BufferSet;
use crate::errors::{from_scheduler, guard, InvariantError, SchedulerError};
use crate::request::parse_spec;

/// Names of the finish codes in `stats`, by number.
const FINISH_NAMES: [&str; 10] = [
    "none",
    "stop_token",
    "stop_string",
    "length",
    "abort",
    "error_nan",
    "error_pool",
    "error_internal",
    "deadline",
    "dropped",
];

/// Decides what runs in each step; owns the prefix cache and all accounting.
#[pyclass(module = "dsserve._native")]
#[derive(Debug)]
pub struct Scheduler {
    inner: core::Scheduler,
    buffers: Vec<BufferSet>,
    /// Buffer sets of the steps in flight, oldest first.
    sets_in_flight: Vec<usize>,
    /// A call panicked: the state may be half changed.
    is_broken: bool,
}

/// What `next_plan` put into a buffer set.
#[pyclass(frozen, get_all, module = "dsserve._native")]
#[derive(Debug)]
pub struct StepSummary {
    step_id: u64,
    phase: u8,
    num_requests: usize,
    num_rows: usize,
    num_replay_rows: u32,
    num_tail_rows: u32,
    num_prefill_tokens: u32,
    num_cached_tokens: u32,
    num_draft_tokens: u32,
    admitted: Vec<u64>,
}

/// New tokens and terminal states, arrays as little-endian bytes.
#[pyclass(frozen, module = "dsserve._native")]
#[derive(Debug)]
pub struct StepOutputs {
    inner: core::StepOutputs,
}

#[pymethods]
impl Scheduler {
    #[new]
    fn new(config_json: &str) -> PyResult<Self> {
        let config: core::SchedulerConfig = serde_json::from_str(config_json)
            .map_err(|error| SchedulerError::new_err(format!("configuration: {error}")))?;
        let inner = core::Scheduler::new(config).map_err(|error| from_scheduler(&error))?;
        Ok(Self {
            inner,
            buffers: Vec::new(),
            sets_in_flight: Vec::new(),
            is_broken: false,
        })
    }

    fn plan_capacity<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let capacity = self.inner.plan_capacity();
        let dict = PyDict::new(py);
        dict.set_item("requests", capacity.requests)?;
        dict.set_item("rows", capacity.rows)?;
        dict.set_item("deltas", capacity.deltas)?;
        dict.set_item("slots", capacity.slots)?;
        dict.set_item("columns", capacity.columns)?;
        Ok(dict)
    }

    fn register_buffers(&mut self, sets: Vec<Bound<'_, PyDict>>) -> PyResult<()> {
        let needed = self.inner.config().max_steps_in_flight as usize + 1;
        if sets.len() != needed {
            let message = format!("{} buffer sets given, {needed} needed", sets.len());
            return Err(SchedulerError::new_err(message));
        }
        if !self.sets_in_flight.is_empty() {
            return Err(SchedulerError::new_err("steps are in flight"));
        }
        let capacity = self.inner.plan_capacity();
        let register = |(index, arrays): (usize, &Bound<'_, PyDict>)| {
            BufferSet::register(arrays, index, capacity)
        };
        self.buffers = sets
            .iter()
            .enumerate()
            .map(register)
            .collect::<PyResult<_>>()?;
        Ok(())
    }

    fn submit(&mut self, specs: Vec<Bound<'_, PyDict>>) -> PyResult<Vec<(u64, String, String)>> {
        let inner = &mut self.inner;
        let parse = |spec| parse_spec(spec, |room| inner.ids_with_room(room));
        let specs = specs.iter().map(parse).collect::<PyResult<Vec<_>>>()?;
        self.call(|inner| Ok(inner.submit(specs)))
            .map(|rejections| {
                rejections
                    .into_iter()
                    .map(|refused| (refused.request_id, refused.code.to_owned(), refused.message))
                    .collect()
            })
    }

    fn extend_prompt(
        &mut self,
        request_id: u64,
        token_ids: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<Option<(u64, String, String)>> {
        let Ok(token_ids) = token_ids.as_slice() else {
            return Err(SchedulerError::new_err("token_ids must be contiguous"));
        };
        let refused = self.call(|inner| Ok(inner.extend_prompt(request_id, token_ids)))?;
        Ok(refused.map(|refused| (refused.request_id, refused.code.to_owned(), refused.message)))
    }

    fn next_plan(
        &mut self,
        py: Python<'_>,
        set_index: usize,
        now_us: u64,
    ) -> PyResult<Option<StepSummary>> {
        self.check_alive()?;
        let Some(buffers) = self.buffers.get(set_index) else {
            let message = format!(
                "buffer set {set_index} is not registered, {} are",
                self.buffers.len()
            );
            return Err(SchedulerError::new_err(message));
        };
        if self.sets_in_flight.contains(&set_index) {
            let message = format!("buffer set {set_index} belongs to a step in flight");
            return Err(SchedulerError::new_err(message));
        }
        let inner = &mut self.inner;
        // Matching prompts may take long, decode rows do not.
        let is_long = inner.num_waiting() > 0;
        let result = guard(|| {
            let plan = if is_long {
                py.detach(|| inner.next_plan(now_us))
            } else {
                inner.next_plan(now_us)
            };
            let Some(plan) = plan.map_err(|error| from_scheduler(&error))? else {
                return Ok(None);
            };
            buffers.write(py, plan).map_err(|error| {
                // The step counts as launched and nobody can run it.
                let step_id = plan.step_id;
                InvariantError::new_err(format!("step {step_id} could not be handed over: {error}"))
            })?;
            Ok(Some(summary(plan)))
        });
        if matches!(result, Ok(Some(_))) {
            self.sets_in_flight.push(set_index);
        }
        self.note_result(py, result)
    }

    #[pyo3(signature = (step_id, token_ids, status, now_us, num_ids=None))]
    fn apply(
        &mut self,
        py: Python<'_>,
        step_id: u64,
        token_ids: PyReadonlyArray1<'_, i32>,
        status: PyReadonlyArray1<'_, u8>,
        now_us: u64,
        num_ids: Option<PyReadonlyArray1<'_, u32>>,
    ) -> PyResult<StepOutputs> {
        self.check_alive()?;
        let is_long = token_ids.len() > 256 || self.inner.oldest_has_prefill();
        let (Ok(token_ids), Ok(status)) = (token_ids.as_slice(), status.as_slice()) else {
            return Err(SchedulerError::new_err("result arrays must be contiguous"));
        };
        let num_ids = num_ids.as_ref().map(PyReadonlyArray1::as_slice).transpose();
        let Ok(num_ids) = num_ids else {
            return Err(SchedulerError::new_err("result arrays must be contiguous"));
        };
        let inner = &mut self.inner;
        let before = inner.steps_in_flight();
        let result = guard(|| {
            let outputs = if is_long {
                // Own inputs before the lock is released.
                let (token_ids, status) = (token_ids.to_vec(), status.to_vec());
                let num_ids = num_ids.map(<[u32]>::to_vec);
                py.detach(|| {
                    apply_to(
                        inner,
                        step_id,
                        &token_ids,
                        num_ids.as_deref(),
                        &status,
                        now_us,
                    )
                })
            } else {
                apply_to(inner, step_id, token_ids, num_ids, status, now_us)
            };
            outputs.map_err(|error| from_scheduler(&error))
        });
        if self.inner.steps_in_flight() < before && !self.sets_in_flight.is_empty() {
            self.sets_in_flight.remove(0);
        }
        self.note_result(py, result)
            .map(|inner| StepOutputs { inner })
    }

    fn take_outputs(&mut self) -> StepOutputs {
        StepOutputs {
            inner: self.inner.take_outputs(),
        }
    }

    fn abort(&mut self, request_ids: Vec<u64>) -> PyResult<()> {
        self.call(|inner| inner.abort(&request_ids))
    }

    fn finish(&mut self, request_id: u64, kept_output_tokens: u32) -> PyResult<()> {
        self.call(|inner| inner.finish(request_id, kept_output_tokens))
    }

    fn flush(&mut self) -> PyResult<(bool, Vec<u64>)> {
        self.call(|inner| {
            Ok(match inner.flush() {
                Ok(_) => (true, Vec::new()),
                Err(holders) => (false, holders),
            })
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let counters = &stats.counters;
        let dict = PyDict::new(py);
        dict.set_item("num_running", stats.num_running)?;
        dict.set_item("num_waiting", stats.num_waiting)?;
        dict.set_item("steps_in_flight", stats.steps_in_flight)?;
        dict.set_item("new_token_ratio", stats.new_token_ratio)?;
        dict.set_item("queued_tokens", stats.queued_tokens)?;
        let rate = stats.prefill_tokens_per_s.unwrap_or(0.0);
        dict.set_item("prefill_tokens_per_s", rate)?;
        let named = [
            ("submitted_total", counters.submitted),
            ("rejected_total", counters.rejected),
            ("admitted_total", counters.admitted),
            ("retracted_total", counters.retracted),
            ("preempted_total", counters.preempted),
            ("rematches_total", counters.rematches),
            ("held_back_total", counters.held_back),
            ("stalled_rows_total", counters.stalled_rows),
            ("prefill_steps_total", counters.prefill_steps),
            ("decode_steps_total", counters.decode_steps),
            ("verify_steps_total", counters.verify_steps),
            ("draft_tokens_total", counters.draft_tokens),
            ("accepted_tokens_total", counters.accepted_tokens),
            ("prompt_tokens_total", counters.prompt_tokens),
            ("cached_tokens_total", counters.cached_tokens),
            ("prefill_tokens_total", counters.prefill_tokens),
            ("encoder_replay_rows_total", counters.encoder_replay_rows),
            ("decoder_tail_rows_total", counters.decoder_tail_rows),
            ("generated_tokens_total", counters.generated_tokens),
            ("evicted_pages_total", counters.evicted_pages),
            ("queue_time_us_total", counters.queue_time_us),
            ("illegal_moves_total", counters.illegal_moves),
        ];
        for (name, value) in named {
            dict.set_item(name, value)?;
        }
        for (name, value) in FINISH_NAMES.iter().zip(counters.finished).skip(1) {
            dict.set_item(format!("finished_{name}_total"), value)?;
        }
        Ok(dict)
    }

    fn pool_table<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let to_dict = |pool: &core::PoolUse| {
            let dict = PyDict::new(py);
            dict.set_item("name", pool.name)?;
            dict.set_item("unit", pool.unit)?;
            dict.set_item("ownership", pool.ownership.name())?;
            dict.set_item("capacity", pool.capacity)?;
            dict.set_item("free", pool.free)?;
            dict.set_item("evictable", pool.evictable)?;
            dict.set_item("locked", pool.locked)?;
            dict.set_item("private", pool.private)?;
            dict.set_item("quarantined", pool.quarantined)?;
            dict.set_item("promised", pool.promised)?;
            Ok(dict)
        };
        self.inner.pool_table().iter().map(to_dict).collect()
    }

    fn check_invariants(&mut self, py: Python<'_>) -> PyResult<()> {
        self.check_alive()?;
        let inner = &self.inner;
        py.detach(|| {
            guard(|| {
                inner
                    .check_invariants()
                    .map_err(|error| from_scheduler(&error))
            })
        })
    }

    fn has_work(&self) -> bool {
        self.inner.has_work()
    }

    fn steps_in_flight(&self) -> usize {
        self.inner.steps_in_flight()
    }
}

impl Scheduler {
    fn call<T>(
        &mut self,
        body: impl FnOnce(&mut core::Scheduler) -> core::Result<T>,
    ) -> PyResult<T> {
        self.check_alive()?;
        let inner = &mut self.inner;
        let result = guard(|| body(inner).map_err(|error| from_scheduler(&error)));
        Python::attach(|py| self.note_result(py, result))
    }

    fn check_alive(&self) -> PyResult<()> {
        if self.is_broken {
            return Err(InvariantError::new_err(
                "the scheduler failed before: end the engine process",
            ));
        }
        Ok(())
    }

    /// After an internal error the state may be half changed: refuse every further call.
    fn note_result<T>(&mut self, py: Python<'_>, result: PyResult<T>) -> PyResult<T> {
        if let Err(error) = &result {
            self.is_broken |= error.is_instance_of::<InvariantError>(py);
        }
        result
    }
}

fn apply_to(
    inner: &mut core::Scheduler,
    step_id: u64,
    token_ids: &[i32],
    num_ids: Option<&[u32]>,
    status: &[u8],
    now_us: u64,
) -> core::Result<core::StepOutputs> {
    match num_ids {
        Some(num_ids) => inner.apply_runs(step_id, token_ids, num_ids, status, now_us),
        None => inner.apply(step_id, token_ids, status, now_us),
    }
}

#[pymethods]
impl StepSummary {
    fn __repr__(&self) -> String {
        format!("{self:?}")
    }
}

#[pymethods]
impl StepOutputs {
    #[getter]
    fn len(&self) -> usize {
        self.inner.len()
    }

    #[getter]
    fn request_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let ids = self.inner.request_ids.iter();
        PyBytes::new(py, &ids.flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>())
    }

    #[getter]
    fn token_offsets<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        if self.inner.is_empty() {
            return words(py, &[0]);
        }
        words(py, &self.inner.token_offsets)
    }

    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        words(py, &self.inner.token_ids)
    }

    #[getter]
    fn finish_codes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let codes = self.inner.finish_codes.iter();
        PyBytes::new(py, &codes.map(|code| *code as u8).collect::<Vec<_>>())
    }

    #[getter]
    fn prompt_lens<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        words(py, &self.inner.prompt_lens)
    }

    #[getter]
    fn cached_lens<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        words(py, &self.inner.cached_lens)
    }

    #[getter]
    fn output_lens<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        words(py, &self.inner.output_lens)
    }
}

fn words<'py>(py: Python<'py>, values: &[u32]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = values.iter().flat_map(|word| word.to_le_bytes()).collect();
    PyBytes::new(py, &bytes)
}

fn summary(plan: &core::StepPlan) -> StepSummary {
    StepSummary {
        step_id: plan.step_id,
        phase: plan.phase as u8,
        num_requests: plan.request_id.len(),
        num_rows: plan.positions.len(),
        num_replay_rows: plan.totals.replay_rows,
        num_tail_rows: plan.totals.tail_rows,
        num_prefill_tokens: plan.totals.prefill_tokens,
        num_cached_tokens: plan.totals.cached_tokens,
        num_draft_tokens: plan.totals.draft_tokens,
        admitted: plan.admitted.clone(),
    }
}
