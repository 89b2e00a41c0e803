//! Results of a step: tokens, ends of requests, prompt pages for the tree (`serving.md` a.9).
use crate::error::{Result, SchedulerError};
use crate::event::{FinishCode, Output, StepOutputs, STATUS_OK};
use crate::overlap::{StepRecord, StepRow};
use crate::scheduler::Scheduler;
use crate::state::{Lifecycle, State};
use crate::table::Key;

impl Scheduler {
    /// Takes the results of the oldest step in flight, one per request in plan order.
    ///
    /// `token_ids` of requests that sampled nothing are ignored. A status other than [`STATUS_OK`]
    /// or an id outside the vocabulary ends that request only. Results of requests that ended or
    /// were aborted meanwhile are dropped. For steps with drafts see [`Scheduler::apply_runs`].
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
        let record = self.oldest_record(step_id)?;
        check_len(record, token_ids.len())?;
        check_len(record, status.len())?;
        self.apply_rows(now_us, |index| (&token_ids[index..=index], status[index]))
    }

    /// As [`Scheduler::apply`], with a run of ids for each request: the accepted drafts and the one
    /// that follows them.
    ///
    /// `num_ids` has the length of each request's run, 0 for those that sampled nothing and, if the
    /// worker likes, for those with another status than [`STATUS_OK`]; `token_ids` has the runs one
    /// after another. Ids past the first stop token or the output limit are dropped.
    ///
    /// # Errors
    /// Those of [`Scheduler::apply`]; [`SchedulerError::WrongRunLen`] (nothing was changed).
    pub fn apply_runs(
        &mut self,
        step_id: u64,
        token_ids: &[i32],
        num_ids: &[u32],
        status: &[u8],
        now_us: u64,
    ) -> Result<StepOutputs> {
        let record = self.oldest_record(step_id)?;
        check_len(record, num_ids.len())?;
        check_len(record, status.len())?;
        let mut ends = Vec::with_capacity(num_ids.len());
        let mut end = 0;
        for ((row, given), status) in record.rows.iter().zip(num_ids).zip(status) {
            let most = if row.rows.samples {
                row.rows.draft_len + 1
            } else {
                0
            };
            let lacks_ids = *given == 0 && most > 0 && *status == STATUS_OK;
            if *given > most || lacks_ids {
                let request = self.requests.get(row.key);
                return Err(SchedulerError::WrongRunLen {
                    step_id,
                    request_id: request.map_or(0, |request| request.spec.request_id),
                    most,
                    given: *given,
                });
            }
            end += *given as usize;
            ends.push(end);
        }
        if end != token_ids.len() {
            return Err(SchedulerError::WrongResultLen {
                step_id,
                expected: end,
                given: token_ids.len(),
            });
        }
        self.apply_rows(now_us, |index| {
            let begin = ends[index] - num_ids[index] as usize;
            (&token_ids[begin..ends[index]], status[index])
        })
    }

    fn oldest_record(&self, step_id: u64) -> Result<&StepRecord> {
        let oldest = self.in_flight.oldest();
        match oldest {
            Some(record) if record.step_id == step_id => Ok(record),
            _ => Err(SchedulerError::WrongStep {
                step_id,
                expected: oldest.map(|record| record.step_id),
            }),
        }
    }

    fn apply_rows<'a>(
        &mut self,
        now_us: u64,
        result: impl Fn(usize) -> (&'a [i32], u8),
    ) -> Result<StepOutputs> {
        self.now_us = self.now_us.max(now_us);
        let mut outputs = StepOutputs::default();
        let Some(record) = self.in_flight.pop() else {
            return Ok(outputs);
        };
        self.prefill_rate
            .note(record.prefill_tokens, record.planned_us, self.now_us);
        for (index, row) in record.rows.iter().enumerate() {
            let (ids, status) = result(index);
            self.apply_row(*row, ids, status, &mut outputs)?;
        }
        self.in_flight.recycle(record);
        self.prune_running();
        self.release_quarantine();
        Ok(outputs)
    }

    fn apply_row(
        &mut self,
        row: StepRow,
        ids: &[i32],
        status: u8,
        outputs: &mut StepOutputs,
    ) -> Result<()> {
        let Some(request) = self.requests.get_mut(row.key) else {
            return Ok(());
        };
        let rows = row.rows;
        let is_current = request.slot != 0 && request.admission == row.admission;
        if is_current && rows.is_prefill {
            request.applied_len = rows.end;
        } else if is_current {
            // Of the row's tokens, so many are committed; the plan assumed all of them.
            let committed = crate::request::len_u32(ids.len());
            request.applied_len += committed;
            request.planned_len -= rows.draft_len + 1 - committed;
        }
        let mut code = FinishCode::None;
        let first_new = request.tokens.len();
        if rows.samples {
            request.pending_steps -= 1;
            request.pending_tokens -= rows.draft_len + 1;
            code = self.commit(row.key, ids, status);
        } else if status != STATUS_OK {
            code = FinishCode::ErrorNan;
        }
        let num_new = self.requests.live(row.key).tokens.len() - first_new;
        if num_new > 0 || code != FinishCode::None {
            self.counters.generated_tokens += num_new as u64;
            if rows.draft_len > 0 && num_new > 0 {
                self.counters.accepted_tokens += num_new as u64 - 1;
            }
            let request = self.requests.live(row.key);
            if self.config.fair {
                let num_new = crate::request::len_u32(num_new);
                self.fairness.charge_output(request.spec.tenant, num_new);
            }
            outputs.push(&self.output_of(row.key, &request.tokens[first_new..], code));
        }
        if code != FinishCode::None {
            // KV behind a NaN may be bad: nothing of it is offered to others. Nor are tokens past a
            // stop, whose KV a run may hold.
            let request = self.requests.live(row.key);
            let valid_len = request.applied_len.min(request.len());
            let valid_len = (code != FinishCode::ErrorNan).then_some(valid_len);
            return self.end_silently(row.key, code, valid_len);
        }
        if is_current && rows.is_prefill {
            self.insert_pages(row.key, rows.end)?;
            let request = self.requests.live(row.key);
            if request.applied_len == request.prefill_len {
                self.fresh.retain(|other| *other != row.key);
            }
        }
        self.requeue_if_settled(row.key);
        Ok(())
    }

    /// Appends a run of ids up to the one that ends the request; says whether one does.
    fn commit(&mut self, key: Key, ids: &[i32], status: u8) -> FinishCode {
        if status != STATUS_OK {
            return FinishCode::ErrorNan;
        }
        for id in ids {
            match u32::try_from(*id) {
                Ok(id) if id < self.config.vocab_size => {
                    self.requests.live_mut(key).tokens.push(id);
                    let code = self.finish_after(key, id);
                    if code != FinishCode::None {
                        return code;
                    }
                }
                _ => return FinishCode::ErrorNan,
            }
        }
        FinishCode::None
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
        let state = self.requests.live(key).state();
        self.move_on(
            key,
            if code.is_early() {
                Lifecycle::abort
            } else {
                Lifecycle::finish
            },
        );
        self.let_go(key, valid_len)?;
        match state {
            State::Received => self.num_receiving -= 1,
            State::Waiting => self.leave_queue(key),
            State::Prefilling => self.carried = None,
            _ => {}
        }
        self.move_on(key, Lifecycle::complete);
        self.remove(key);
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

fn check_len(record: &StepRecord, given: usize) -> Result<()> {
    let expected = record.rows.len();
    if given == expected {
        return Ok(());
    }
    Err(SchedulerError::WrongResultLen {
        step_id: record.step_id,
        expected,
        given,
    })
}
