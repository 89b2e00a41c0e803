//! `Scheduler`: the calls of the engine loop; the only thing that changes state.
use std::mem;

use dsserve_radix_cache::{CacheConfig, RadixCache};

use crate::budget::NewTokenRatio;
use crate::config::SchedulerConfig;
use crate::counters::Counters;
use crate::digest::TableDigest;
use crate::error::{Result, SchedulerError};
use crate::event::{FinishCode, StepOutputs};
use crate::fair::Fairness;
use crate::hits::Hits;
use crate::overlap::{InFlight, Quarantine, Rewritten, StepRecord};
use crate::plan::{PlanCapacity, StepPlan};
use crate::policy::SortKey;
use crate::queue::Queue;
use crate::rate::{PrefillRate, QueuedTokens};
use crate::spare::SpareIds;
use crate::state::{IllegalMove, Lifecycle, State};
use crate::table::{Key, Table};
use crate::timers::Timers;

/// Decides what runs in each step; owns the prefix cache, the pools and all requests.
///
/// Single-threaded and deterministic: the same calls give the same plans.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) cache: RadixCache,
    pub(crate) requests: Table,
    pub(crate) waiting: Queue,
    /// Requests that are not in it yet, because parts of their prompts are missing.
    pub(crate) num_receiving: usize,
    /// Matches of waiting requests.
    pub(crate) hits: Hits,
    /// Evicted and flushed pages when the matches were last checked.
    pub(crate) num_evictions_seen: u64,
    /// Uncached tokens of the waiting requests.
    pub(crate) queued_tokens: QueuedTokens,
    pub(crate) fairness: Fairness,
    pub(crate) timers: Timers,
    pub(crate) prefill_rate: PrefillRate,
    /// The one request whose prompt is partly planned.
    pub(crate) carried: Option<Key>,
    /// The last step that holds it, and the steps since.
    pub(crate) carried_step: u64,
    pub(crate) carried_deferred: u32,
    /// Requests whose whole prompt is planned, in order of admission.
    pub(crate) running: Vec<Key>,
    /// Requests whose prompt pages are not all in the tree yet.
    pub(crate) fresh: Vec<Key>,
    pub(crate) free_slots: Vec<u32>,
    pub(crate) in_flight: InFlight,
    pub(crate) quarantine: Quarantine,
    pub(crate) ratio: NewTokenRatio,
    /// Page-table entries to send again: the tree had the page already.
    pub(crate) rewritten: Vec<Rewritten>,
    /// Digest of the page table that the plans lead to.
    pub(crate) digest: TableDigest,
    pub(crate) released_slots: Vec<u32>,
    /// Terminal states that no step carries.
    pub(crate) outputs: StepOutputs,
    pub(crate) counters: Counters,
    pub(crate) now_us: u64,
    /// The plan being built, and its record.
    pub(crate) plan: StepPlan,
    pub(crate) record: StepRecord,
    /// Whether the plan being built retracted a request: then it looks at the queue no further.
    pub(crate) has_retracted: bool,
    /// Whether the plan being built has drafts behind its decode rows.
    pub(crate) has_drafts: bool,
    pub(crate) scratch: Vec<Key>,
    pub(crate) sort_entries: Vec<(SortKey, Key)>,
    /// Class, rank and tenant of the requests admitted in the plan being built.
    pub(crate) admitted_places: Vec<(i64, i64, u64)>,
    /// DECODE steps due before the next PREFILL step.
    pub(crate) decodes_due: u32,
    decode_keys: Vec<Key>,
    /// Requests that attempted an illegal state move.
    faulted: Vec<Key>,
    pub(crate) next_sequence: u64,
    pub(crate) spare_ids: SpareIds,
}

impl Scheduler {
    /// A scheduler with nothing to do.
    ///
    /// # Errors
    /// [`SchedulerError::Config`] listing every wrong value.
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        config.validate()?;
        let cache = RadixCache::new(
            CacheConfig::new(config.page_size, config.num_pages)
                .with_enabled(config.uses_tree())
                .with_policy(config.eviction_policy.of_cache()),
        )?;
        Ok(Self {
            cache,
            requests: Table::default(),
            waiting: Queue::default(),
            num_receiving: 0,
            hits: Hits::default(),
            num_evictions_seen: 0,
            queued_tokens: QueuedTokens::default(),
            fairness: Fairness::default(),
            timers: Timers::default(),
            prefill_rate: PrefillRate::default(),
            carried: None,
            carried_step: 0,
            carried_deferred: 0,
            running: Vec::new(),
            fresh: Vec::new(),
            free_slots: (1..=config.max_running_requests).rev().collect(),
            in_flight: InFlight::default(),
            quarantine: Quarantine::default(),
            ratio: NewTokenRatio::new(&config),
            rewritten: Vec::new(),
            digest: TableDigest::new(config.max_running_requests + 1),
            released_slots: Vec::new(),
            outputs: StepOutputs::default(),
            counters: Counters::default(),
            now_us: 0,
            plan: StepPlan::default(),
            record: StepRecord::default(),
            has_retracted: false,
            has_drafts: false,
            scratch: Vec::new(),
            sort_entries: Vec::new(),
            admitted_places: Vec::new(),
            decodes_due: 0,
            decode_keys: Vec::new(),
            faulted: Vec::new(),
            next_sequence: 0,
            spare_ids: SpareIds::default(),
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

    /// Plans the next step, or `None` when nothing can run now.
    ///
    /// Ends requests whose time is over first. Time never runs backwards: an earlier `now_us` than
    /// before counts as the same.
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
        self.end_overdue()?;
        self.hold_recent()?;
        loop {
            let retracted = self.counters.retracted;
            let record = self.build_record()?;
            if !record.rows.is_empty() {
                self.finish_plan(record);
                return Ok(Some(&self.plan));
            }
            self.in_flight.recycle(record);
            // What was retracted may make room for something: look again.
            if self.counters.retracted == retracted {
                return Ok(None);
            }
        }
    }

    fn build_record(&mut self) -> Result<StepRecord> {
        self.plan.clear();
        self.record = self.in_flight.open();
        self.has_retracted = false;
        let mut keys = mem::take(&mut self.decode_keys);
        let built = self.build(&mut keys);
        self.decode_keys = keys;
        let record = mem::take(&mut self.record);
        built.map(|()| record)
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
        if self.requests.live(key).state() == State::Received {
            return self.abort(&[request_id]); // it never ran, so there is no output to stop
        }
        let request = self.requests.live_mut(key);
        let kept_len = (request.prompt_len as usize) + kept_output_tokens as usize;
        request.tokens.truncate(kept_len);
        let valid_len = request.applied_len.min(request.len());
        self.end_request(key, FinishCode::StopString, Some(valid_len))?;
        self.prune_running();
        Ok(())
    }

    /// An empty list with room for so many ids, for the prompt of a request: memory of one that ended.
    pub fn ids_with_room(&mut self, room: usize) -> Vec<u32> {
        self.spare_ids.take(room)
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
        self.counters.flushed_pages += u64::from(flushed);
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
        self.in_flight.oldest().is_some_and(StepRecord::has_prefill)
    }

    /// Takes a request out of the table.
    pub(crate) fn remove(&mut self, key: Key) {
        if let Some(request) = self.requests.remove(key) {
            self.spare_ids.keep(request.tokens);
        }
    }

    /// Drops requests that ended or were retracted from the running list.
    pub(crate) fn prune_running(&mut self) {
        let requests = &self.requests;
        self.running.retain(|key| requests.get(*key).is_some());
    }

    /// Moves a request to another state. An illegal move is a bug: it panics in debug builds; in
    /// release builds the request is ended with the next plan.
    pub(crate) fn move_on(
        &mut self,
        key: Key,
        step: fn(&mut Lifecycle) -> std::result::Result<(), IllegalMove>,
    ) {
        let moved = step(&mut self.requests.live_mut(key).life);
        debug_assert!(moved.is_ok(), "{moved:?}");
        if moved.is_err() {
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
