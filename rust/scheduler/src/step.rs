//! One step: prompts or decode rows first, and what is booked for each.
use crate::budget::Budget;
use crate::error::Result;
use crate::overlap::{StepRecord, StepRow};
use crate::plan::Phase;
use crate::request::Request;
use crate::scheduler::Scheduler;
use crate::state::State;
use crate::table::Key;

impl Scheduler {
    /// Fills the plan: prompts first unless decode steps are due.
    pub(crate) fn build(&mut self, keys: &mut Vec<Key>) -> Result<()> {
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

    pub(crate) fn finish_plan(&mut self, record: StepRecord) {
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
}
