//! Results of a step: tokens, ends of requests, prompt pages for the tree (`serving.md` a.9).
use crate::error::{Result, SchedulerError};
use crate::event::{FinishCode, Output, StepOutputs, STATUS_OK};
use crate::overlap::StepRow;
use crate::scheduler::Scheduler;
use crate::state::State;
use crate::table::Key;

impl Scheduler {
    /// Takes the results of the oldest step in flight, one per request in plan order.
    ///
    /// `token_ids` of requests that sampled nothing are ignored. A status other than [`STATUS_OK`]
    /// or an id outside the vocabulary ends that request only. Results of requests that ended or
    /// were aborted meanwhile are dropped.
    ///
    /// # Errors
    /// [`SchedulerError::WrongStep`], [`SchedulerError::WrongResultLen`] (nothing was changed);
    /// [`SchedulerError::Cache`] on broken accounting.
    pub fn apply(
        &mut self,
        step_id: u64,
        token_ids: &[i32],
        status: &[u8],
        now_us: u64,
    ) -> Result<StepOutputs> {
        self.now_us = self.now_us.max(now_us);
        let oldest = self.in_flight.oldest();
        let expected = oldest.map(|record| record.step_id);
        if expected != Some(step_id) {
            return Err(SchedulerError::WrongStep { step_id, expected });
        }
        let expected = oldest.map_or(0, |record| record.rows.len());
        for given in [token_ids.len(), status.len()] {
            if given != expected {
                return Err(SchedulerError::WrongResultLen {
                    step_id,
                    expected,
                    given,
                });
            }
        }
        let Some(record) = self.in_flight.pop() else {
            return Err(SchedulerError::WrongStep {
                step_id,
                expected: None,
            });
        };
        let mut outputs = StepOutputs::default();
        for (index, row) in record.rows.iter().enumerate() {
            self.apply_row(*row, token_ids[index], status[index], &mut outputs)?;
        }
        self.in_flight.recycle(record);
        self.prune_running();
        self.release_quarantine();
        Ok(outputs)
    }

    fn apply_row(
        &mut self,
        row: StepRow,
        token_id: i32,
        status: u8,
        outputs: &mut StepOutputs,
    ) -> Result<()> {
        let Some(request) = self.requests.get_mut(row.key) else {
            return Ok(());
        };
        let is_current = request.slot != 0 && request.admission == row.admission;
        if is_current {
            request.applied_len = row.end;
        }
        let mut code = FinishCode::None;
        let mut new_token = None;
        if row.samples {
            request.pending_tokens -= 1;
            match u32::try_from(token_id) {
                Ok(id) if status == STATUS_OK && id < self.config.vocab_size => {
                    request.tokens.push(id);
                    new_token = Some(id);
                    code = self.finish_after(row.key, id);
                }
                _ => code = FinishCode::ErrorNan,
            }
        } else if status != STATUS_OK {
            code = FinishCode::ErrorNan;
        }
        if new_token.is_some() || code != FinishCode::None {
            self.counters.generated_tokens += u64::from(new_token.is_some());
            outputs.push(&self.output_of(row.key, new_token.as_slice(), code));
        }
        if code != FinishCode::None {
            // KV behind a NaN may be bad: nothing of it is offered to others.
            let valid_len = (code != FinishCode::ErrorNan).then_some(row.end);
            return self.end_silently(row.key, code, valid_len);
        }
        if is_current && row.is_prefill {
            self.insert_pages(row.key, row.end)?;
            let request = self.requests.live(row.key);
            if request.applied_len == request.prefill_len {
                self.fresh.retain(|other| *other != row.key);
            }
        }
        self.requeue_if_settled(row.key);
        Ok(())
    }

    /// Whether the request ends with `id`, its newest token.
    fn finish_after(&self, key: Key, id: u32) -> FinishCode {
        let request = self.requests.live(key);
        let spec = &request.spec;
        let is_stop = spec.stop_token_ids.contains(&id)
            || (!spec.ignore_eos && self.config.eos_token_ids.contains(&id));
        if is_stop && request.output_len() >= spec.min_new_tokens {
            FinishCode::StopToken
        } else if request.output_len() >= spec.max_new_tokens {
            FinishCode::Length
        } else {
            FinishCode::None
        }
    }

    /// Ends a request and queues its terminal output for `take_outputs`.
    pub(crate) fn end_request(
        &mut self,
        key: Key,
        code: FinishCode,
        valid_len: Option<u32>,
    ) -> Result<()> {
        let mut outputs = std::mem::take(&mut self.outputs);
        outputs.push(&self.output_of(key, &[], code));
        self.outputs = outputs;
        self.end_silently(key, code, valid_len)
    }

    /// Ends a request whose terminal output is out; the caller prunes the running list.
    fn end_silently(&mut self, key: Key, code: FinishCode, valid_len: Option<u32>) -> Result<()> {
        self.let_go(key, valid_len)?;
        let state = self.requests.live(key).state;
        self.enter(key, State::Done);
        match state {
            State::Waiting => self.waiting.remove(key),
            State::Prefilling => self.carried = None,
            State::Running | State::Retracted | State::Done => {}
        }
        self.requests.remove(key);
        self.counters.finished[code as usize] += 1;
        Ok(())
    }

    fn output_of<'a>(&self, key: Key, token_ids: &'a [u32], code: FinishCode) -> Output<'a> {
        let request = self.requests.live(key);
        Output {
            request_id: request.spec.request_id,
            token_ids,
            code,
            prompt_len: request.prompt_len,
            cached_len: request.reported_hit.unwrap_or(0),
            output_len: request.output_len(),
        }
    }
}
