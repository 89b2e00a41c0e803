//! One step: prompts or decode rows first, and what is booked for each.
use crate::budget::Budget;
use crate::config::Policy;
use crate::error::Result;
use crate::overlap::{StepRecord, StepRow};
use crate::plan::Phase;
use crate::request::len_u32;
use crate::scheduler::Scheduler;
use crate::state::Lifecycle;
use crate::table::Key;

/// The rows that one request has in a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// Tokens whose KV is valid after them, all drafts accepted.
    pub end: u32,
    /// Drafts among them.
    pub draft_len: u32,
    pub samples: bool,
    pub is_prefill: bool,
}

impl Scheduler {
    /// Fills the plan: prompts first unless decode steps are due.
    pub(crate) fn build(&mut self, keys: &mut Vec<Key>) -> Result<()> {
        keys.clear();
        self.has_drafts = false;
        let may_prefill = self.config.overlap_prefills || !self.in_flight.has_prefill();
        let has_prompts = may_prefill && (self.carried.is_some() || !self.waiting.is_empty());
        let must_go_on =
            self.carried.is_some() && self.carried_deferred >= self.config.prefill_max_defer;
        let is_due = self.decodes_due == 0 || self.running.is_empty() || must_go_on;
        let prompts_first = has_prompts && is_due;
        if prompts_first {
            if self.config.mixed_chunk {
                self.prepare_decode(keys)?;
            }
            self.push_prompts(keys.len())?;
            // A prompt may have taken the place of a request that was to decode.
            let requests = &self.requests;
            keys.retain(|key| requests.live(*key).slot != 0);
        }
        let uses_drafts = self.config.draft_len > 0;
        if self.record.rows.is_empty() && (keys.is_empty() || uses_drafts) {
            // No prompt joins the decode rows: then they have drafts.
            self.has_drafts = uses_drafts;
            self.prepare_decode(keys)?;
            if keys.is_empty() && has_prompts && !prompts_first {
                // Decode rows were due but none can run now: prompts need not wait for them.
                self.push_prompts(0)?;
            }
        }
        let has_prompt_rows = !self.record.rows.is_empty();
        self.plan.phase = if has_prompt_rows {
            Phase::Prefill
        } else if self.has_drafts {
            Phase::Verify
        } else {
            Phase::Decode
        };
        self.push_decode_rows(keys);
        Ok(())
    }

    fn push_prompts(&mut self, decode_rows: usize) -> Result<()> {
        let mut budget = Budget::new(&self.config, len_u32(decode_rows));
        if let Some(shorter_than) = self.yields_to_shorter() {
            self.admit_waiting(&mut budget, Some(shorter_than))?;
        }
        if let Some(key) = self.carried {
            if budget.has_room() {
                self.push_carried(key, &mut budget);
            }
        }
        if self.has_retracted {
            return Ok(());
        }
        self.admit_waiting(&mut budget, None)
    }

    /// Under `ShortestPrefillFirst`, what is left of a partly planned prompt that shorter ones may
    /// still pass.
    fn yields_to_shorter(&self) -> Option<u32> {
        let key = self.carried?;
        let may_yield = self.config.policy == Policy::ShortestPrefillFirst
            && self.carried_deferred < self.config.prefill_max_defer
            && !self.has_retracted;
        let request = self.requests.live(key);
        may_yield.then_some(request.prefill_len - request.planned_len)
    }

    fn push_carried(&mut self, key: Key, budget: &mut Budget) {
        let request = self.requests.live(key);
        let Some(end) = self.carried_chunk(request, budget) else {
            return;
        };
        if self.pages_due(request, end) > self.cache.num_free() + self.cache.num_evictable() {
            // Some that were promised went to the quarantine: they return with the steps in flight.
            self.counters.stalled_rows += 1;
            return;
        }
        let is_last = end == request.prefill_len;
        budget.take_request(0);
        self.push_chunk(key, end, 0, budget);
        self.carried_step = self.record.step_id;
        if is_last {
            self.carried = None;
            self.move_on(key, Lifecycle::start_running);
            self.running.push(key);
        }
    }

    /// Books rows of a request: page-table entries, record, progress.
    pub(crate) fn note_rows(&mut self, key: Key, rows: Rows) {
        let request = self.requests.live_mut(key);
        let columns = rows.end.div_ceil(self.config.page_size);
        for column in request.sent_columns..columns {
            let page = request.pages[column as usize];
            self.plan.push_delta(request.slot, column, page);
            self.digest.add(request.slot, column, page);
        }
        request.sent_columns = request.sent_columns.max(columns);
        request.planned_len = rows.end;
        if rows.samples {
            request.pending_steps += 1;
            request.pending_tokens += rows.draft_len + 1;
        }
        request.last_step = self.record.step_id;
        self.record.rows.push(StepRow {
            key,
            admission: request.admission,
            rows,
        });
    }

    pub(crate) fn finish_plan(&mut self, mut record: StepRecord) {
        let plan = &mut self.plan;
        plan.step_id = record.step_id;
        plan.group_id = self.config.group_id;
        for entry in self.rewritten.drain(..) {
            let request = self.requests.get(entry.key);
            let holds = |request: &&crate::request::Request| {
                request.slot != 0 && request.admission == entry.admission
            };
            if let Some(request) = request.filter(holds) {
                let page = request.pages[entry.column as usize];
                plan.push_delta(request.slot, entry.column, page);
                self.digest.remove(request.slot, entry.column, entry.own);
                self.digest.add(request.slot, entry.column, page);
            }
        }
        plan.released_slots
            .extend(self.released_slots.drain(..).map(crate::plan::signed));
        plan.digest = self.digest.of_step(plan.step_id);
        let totals = plan.totals;
        record.planned_us = self.now_us;
        record.prefill_tokens = totals.prefill_tokens;
        if self.carried_step != record.step_id && self.carried.is_some() {
            self.carried_deferred += 1;
        } else {
            self.carried_deferred = 0;
        }
        match plan.phase {
            Phase::Prefill => {
                self.decodes_due = self.config.prefill_decode_interval;
                self.counters.prefill_steps += 1;
                self.counters.prefill_tokens += u64::from(totals.prefill_tokens);
                self.counters.encoder_replay_rows += u64::from(totals.replay_rows);
                self.counters.decoder_tail_rows += u64::from(totals.tail_rows);
            }
            Phase::Idle | Phase::Decode | Phase::Verify | Phase::Prebuilt => {
                self.decodes_due = self.decodes_due.saturating_sub(1);
                self.counters.decode_steps += u64::from(plan.phase == Phase::Decode);
                self.counters.verify_steps += u64::from(plan.phase == Phase::Verify);
                self.counters.draft_tokens += u64::from(totals.draft_tokens);
                self.ratio.decay();
            }
        }
        self.in_flight.push(record);
    }
}
