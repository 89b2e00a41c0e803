//! `Scheduler`: the calls of the engine loop; the only thing that changes state.
use std::mem;

use dsserve_radix_cache::{CacheConfig, RadixCache};

use crate::budget::{Budget, NewTokenRatio};
use crate::config::SchedulerConfig;
use crate::error::{Result, SchedulerError};
use crate::event::{FinishCode, Rejection, StepOutputs};
use crate::overlap::{InFlight, Quarantine, StepRecord, StepRow};
use crate::plan::{Phase, PlanCapacity, StepPlan};
use crate::queue::Queue;
use crate::request::{Request, RequestSpec};
use crate::state::State;
use crate::stats::Counters;
use crate::table::{Key, Table};

/// Decides what runs in each step; owns the prefix cache, the pools and all requests.
///
/// Single-threaded and deterministic: the same calls give the same plans.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) cache: RadixCache,
    /// Changes whenever a match could come out differently.
    pub(crate) tree_version: u64,
    pub(crate) requests: Table,
    pub(crate) waiting: Queue,
    /// The one request whose prompt is partly planned.
    pub(crate) carried: Option<Key>,
    /// Requests whose whole prompt is planned, in order of admission.
    pub(crate) running: Vec<Key>,
    /// Requests whose prompt pages are not all in the tree yet.
    pub(crate) fresh: Vec<Key>,
    pub(crate) free_slots: Vec<u32>,
    pub(crate) in_flight: InFlight,
    pub(crate) quarantine: Quarantine,
    pub(crate) ratio: NewTokenRatio,
    /// Page-table entries to send again: the tree had the page already.
    pub(crate) rewritten: Vec<(Key, u32, u32)>,
    pub(crate) released_slots: Vec<u32>,
    /// Terminal states that no step carries.
    pub(crate) outputs: StepOutputs,
    pub(crate) counters: Counters,
    pub(crate) now_us: u64,
    /// The plan being built, and its record.
    pub(crate) plan: StepPlan,
    pub(crate) record: StepRecord,
    /// Whether the plan being built retracted a request: then it admits none.
    pub(crate) has_retracted: bool,
    pub(crate) scratch: Vec<Key>,
    /// DECODE steps due before the next PREFILL step.
    decodes_due: u32,
    decode_keys: Vec<Key>,
    /// Requests that attempted an illegal state move.
    faulted: Vec<Key>,
    next_sequence: u64,
}

impl Scheduler {
    /// A scheduler with nothing to do.
    ///
    /// # Errors
    /// [`SchedulerError::Config`] listing every wrong value.
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        config.validate()?;
        let cache = RadixCache::new(CacheConfig {
            page_size: config.page_size,
            num_pages: config.num_pages,
            enabled: config.uses_tree(),
        })?;
        Ok(Self {
            cache,
            tree_version: 0,
            requests: Table::default(),
            waiting: Queue::default(),
            carried: None,
            running: Vec::new(),
            fresh: Vec::new(),
            free_slots: (1..=config.max_running_requests).rev().collect(),
            in_flight: InFlight::default(),
            quarantine: Quarantine::default(),
            ratio: NewTokenRatio::new(&config),
            rewritten: Vec::new(),
            released_slots: Vec::new(),
            outputs: StepOutputs::default(),
            counters: Counters::default(),
            now_us: 0,
            plan: StepPlan::default(),
            record: StepRecord::default(),
            has_retracted: false,
            scratch: Vec::new(),
            decodes_due: 0,
            decode_keys: Vec::new(),
            faulted: Vec::new(),
            next_sequence: 0,
            config,
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Array lengths that every plan fits.
    #[must_use]
    pub fn plan_capacity(&self) -> PlanCapacity {
        PlanCapacity::of(&self.config)
    }

    /// Queues requests; returns those that are refused.
    pub fn submit(&mut self, specs: Vec<RequestSpec>) -> Vec<Rejection> {
        let mut rejections = Vec::new();
        for spec in specs {
            let request_id = spec.request_id;
            match self.check_spec(spec) {
                Ok(request) => self.accept(request),
                Err((code, message)) => {
                    self.counters.rejected += 1;
                    rejections.push(Rejection {
                        request_id,
                        code,
                        message,
                    });
                }
            }
        }
        rejections
    }

    /// Plans the next step, or `None` when nothing can run now.
    ///
    /// # Errors
    /// [`SchedulerError::TooManySteps`]; [`SchedulerError::Cache`] on broken accounting.
    pub fn next_plan(&mut self, now_us: u64) -> Result<Option<&StepPlan>> {
        let (in_flight, limit) = (
            self.in_flight.len(),
            self.config.max_steps_in_flight as usize,
        );
        if in_flight >= limit {
            return Err(SchedulerError::TooManySteps { in_flight, limit });
        }
        self.now_us = self.now_us.max(now_us);
        self.end_faulted()?;
        self.plan.clear();
        self.record = self.in_flight.open();
        self.has_retracted = false;
        let mut keys = mem::take(&mut self.decode_keys);
        let built = self.build(&mut keys);
        self.decode_keys = keys;
        let record = mem::take(&mut self.record);
        built?;
        if record.rows.is_empty() {
            self.in_flight.recycle(record);
            return Ok(None);
        }
        self.finish_plan(record);
        Ok(Some(&self.plan))
    }

    /// Ends requests in any state; ids that are unknown (ended already) are ignored.
    ///
    /// # Errors
    /// [`SchedulerError::Cache`] on broken accounting.
    pub fn abort(&mut self, request_ids: &[u64]) -> Result<()> {
        for request_id in request_ids {
            if let Some(key) = self.requests.find(*request_id) {
                let valid_len = self.requests.live(key).applied_len;
                self.end_request(key, FinishCode::Abort, Some(valid_len))?;
            }
        }
        self.prune_running();
        Ok(())
    }

    /// Ends a request at a stop string: output past `kept_output_tokens` is dropped.
    ///
    /// Ignored if the request is unknown (it ended already).
    ///
    /// # Errors
    /// [`SchedulerError::Cache`] on broken accounting.
    pub fn finish(&mut self, request_id: u64, kept_output_tokens: u32) -> Result<()> {
        let Some(key) = self.requests.find(request_id) else {
            return Ok(());
        };
        let request = self.requests.live_mut(key);
        let kept_len = (request.prompt_len as usize) + kept_output_tokens as usize;
        request.tokens.truncate(kept_len);
        let valid_len = request.applied_len.min(request.len());
        self.end_request(key, FinishCode::StopString, Some(valid_len))?;
        self.prune_running();
        Ok(())
    }

    /// Terminal states since the last call that no step's outputs carry.
    pub fn take_outputs(&mut self) -> StepOutputs {
        mem::take(&mut self.outputs)
    }

    /// Empties the prefix cache.
    ///
    /// # Errors
    /// With the ids of the requests that hold pages, while any does or a step in flight reads some.
    pub fn flush(&mut self) -> std::result::Result<u32, Vec<u64>> {
        let holders: Vec<u64> = self
            .requests
            .iter()
            .filter(|request| request.slot != 0)
            .map(|request| request.spec.request_id)
            .collect();
        if !holders.is_empty() || !self.quarantine.is_empty() {
            return Err(holders);
        }
        let flushed = self.cache.flush().map_err(|_| Vec::new())?;
        self.tree_version += 1;
        Ok(flushed)
    }

    /// Whether any request has not ended or a step is in flight.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.requests.len() > 0 || self.in_flight.len() > 0
    }

    /// Steps planned and not applied.
    #[must_use]
    pub fn steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Requests in the queue.
    #[must_use]
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether the oldest step in flight holds prompt rows, whose pages `apply` gives to the tree.
    #[must_use]
    pub fn oldest_has_prefill(&self) -> bool {
        let oldest = self.in_flight.oldest();
        oldest.is_some_and(|record| record.rows.first().is_some_and(|row| row.is_prefill))
    }

    fn check_spec(
        &self,
        spec: RequestSpec,
    ) -> std::result::Result<Request, (&'static str, String)> {
        let config = &self.config;
        if self.requests.find(spec.request_id).is_some() {
            let message = format!("request {} is known and has not ended", spec.request_id);
            return Err(("duplicate_request_id", message));
        }
        if spec.token_ids.is_empty() {
            return Err(("empty_prompt", "the prompt has no tokens".to_owned()));
        }
        let vocab_size = config.vocab_size;
        let mut ids = spec.token_ids.iter().chain(&spec.stop_token_ids);
        if let Some(id) = ids.find(|id| **id >= vocab_size) {
            let message = format!("token id {id} is outside the vocabulary of {vocab_size}");
            return Err(("invalid_token_id", message));
        }
        let (prompt_len, limit) = (spec.token_ids.len() as u64, config.context_length);
        let total = prompt_len + u64::from(spec.max_new_tokens);
        if total > u64::from(limit) {
            let message = format!(
                "the prompt has {prompt_len} tokens and max_new_tokens is {}: {total} exceed the \
                 context length of {limit}; shorten either",
                spec.max_new_tokens
            );
            return Err(("context_length_exceeded", message));
        }
        let request = Request::new(spec, self.next_sequence);
        if let Some((pool, units, capacity)) = self.never_fits(&request) {
            let message = format!(
                "the request needs {units} units of pool {}, which has {capacity}; shorten the \
                 prompt or max_new_tokens",
                pool.name()
            );
            return Err(("pool_capacity_exceeded", message));
        }
        let limit = config.max_queued_requests.map(|limit| limit as usize);
        if limit.is_some_and(|limit| self.waiting.len() >= limit) {
            let message = format!("{} requests are waiting; try later", self.waiting.len());
            return Err(("queue_full", message));
        }
        Ok(request)
    }

    fn accept(&mut self, request: Request) {
        self.next_sequence += 1;
        self.counters.submitted += 1;
        let wants_nothing = request.spec.max_new_tokens == 0;
        let key = self.requests.insert(request);
        self.waiting.push(key);
        if wants_nothing {
            let ended = self.end_request(key, FinishCode::Length, None);
            debug_assert!(ended.is_ok(), "a waiting request holds nothing");
        }
    }

    /// Fills the plan: prompts first unless decode steps are due.
    fn build(&mut self, keys: &mut Vec<Key>) -> Result<()> {
        keys.clear();
        let has_prompts = self.carried.is_some() || !self.waiting.is_empty();
        let prompts_first = has_prompts && (self.decodes_due == 0 || self.running.is_empty());
        if prompts_first {
            if self.config.mixed_chunk {
                self.prepare_decode(keys)?;
            }
            self.push_prompts(keys.len())?;
        }
        if self.record.rows.is_empty() && keys.is_empty() {
            self.prepare_decode(keys)?;
            if keys.is_empty() && has_prompts && !prompts_first {
                // Decode rows were due but none can run now: prompts need not wait for them.
                self.push_prompts(0)?;
            }
        }
        let has_prompt_rows = !self.record.rows.is_empty();
        self.plan.phase = if has_prompt_rows {
            Phase::Prefill
        } else {
            Phase::Decode
        };
        self.push_decode_rows(keys);
        Ok(())
    }

    fn push_prompts(&mut self, decode_rows: usize) -> Result<()> {
        let decode_rows = crate::request::len_u32(decode_rows);
        let mut budget = Budget::new(&self.config, decode_rows);
        if let Some(key) = self.carried {
            let request = self.requests.live(key);
            if let Some(end) = self.carried_chunk(request, &budget) {
                let is_last = end == request.prefill_len;
                self.push_chunk(key, end, 0, &mut budget);
                if is_last {
                    self.carried = None;
                    self.enter(key, State::Running);
                    self.running.push(key);
                }
            }
        }
        if self.has_retracted {
            return Ok(());
        }
        self.admit_waiting(&mut budget)
    }

    /// Books rows of a request up to position `end`: page-table entries, record, progress.
    pub(crate) fn note_rows(&mut self, key: Key, end: u32, samples: bool, is_prefill: bool) {
        let request = self.requests.live_mut(key);
        let columns = end.div_ceil(self.config.page_size);
        for column in request.sent_columns..columns {
            let page = request.pages[column as usize];
            self.plan.push_delta(request.slot, column, page);
        }
        request.sent_columns = request.sent_columns.max(columns);
        request.planned_len = end;
        request.pending_tokens += u32::from(samples);
        request.last_step = self.record.step_id;
        self.record.rows.push(StepRow {
            key,
            admission: request.admission,
            end,
            samples,
            is_prefill,
        });
    }

    fn finish_plan(&mut self, record: StepRecord) {
        let plan = &mut self.plan;
        plan.step_id = record.step_id;
        for (key, admission, column) in self.rewritten.drain(..) {
            let request = self.requests.get(key);
            let is_same = |request: &&Request| request.slot != 0 && request.admission == admission;
            if let Some(request) = request.filter(is_same) {
                plan.push_delta(request.slot, column, request.pages[column as usize]);
            }
        }
        plan.released_slots
            .extend(self.released_slots.drain(..).map(crate::plan::signed));
        let totals = plan.totals;
        if plan.phase == Phase::Prefill {
            self.decodes_due = self.config.prefill_decode_interval;
            self.counters.prefill_steps += 1;
            self.counters.prefill_tokens += u64::from(totals.prefill_tokens);
            self.counters.encoder_replay_rows += u64::from(totals.replay_rows);
            self.counters.decoder_tail_rows += u64::from(totals.tail_rows);
        } else {
            self.decodes_due = self.decodes_due.saturating_sub(1);
            self.counters.decode_steps += 1;
            self.ratio.decay();
        }
        self.in_flight.push(record);
    }

    /// Drops requests that ended or were retracted from the running list.
    pub(crate) fn prune_running(&mut self) {
        let requests = &self.requests;
        self.running.retain(|key| requests.get(*key).is_some());
    }

    /// Moves a request to another state. An illegal move is a bug: it panics in debug builds; in
    /// release builds the request is ended with the next plan.
    pub(crate) fn enter(&mut self, key: Key, to: State) {
        let request = self.requests.live_mut(key);
        let is_legal = request.state.can_become(to);
        debug_assert!(is_legal, "{:?} cannot become {to:?}", request.state);
        request.state = to;
        if !is_legal {
            self.counters.illegal_moves += 1;
            self.faulted.push(key);
        }
    }

    fn end_faulted(&mut self) -> Result<()> {
        for key in mem::take(&mut self.faulted) {
            if self.requests.get(key).is_some() {
                self.end_request(key, FinishCode::ErrorInternal, None)?;
                self.prune_running();
            }
        }
        Ok(())
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // The cache goes with its receipts, which would otherwise report a leak.
        let receipts = self.requests.iter_mut().filter_map(|r| r.receipt.take());
        let left = self.quarantine.drain().filter_map(|entry| entry.receipt);
        for receipt in receipts.chain(left) {
            receipt.abandon();
        }
    }
}
