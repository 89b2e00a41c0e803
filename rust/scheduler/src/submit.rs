//! New requests: what is refused at once, and with which code.
use crate::config::SchedulerConfig;
use crate::error::Result;
use crate::event::{FinishCode, Rejection};
use crate::request::{Request, RequestSpec};
use crate::scheduler::Scheduler;
use crate::state::Lifecycle;
use crate::table::Key;

/// Code and message of a refusal.
pub(crate) type Refusal = (&'static str, String);

impl Scheduler {
    /// Queues requests; returns those that are refused.
    ///
    /// A full queue drops its least urgent request for a more urgent one, where priorities are
    /// enabled.
    pub fn submit(&mut self, specs: Vec<RequestSpec>) -> Vec<Rejection> {
        let mut rejections = Vec::new();
        for spec in specs {
            let request_id = spec.request_id;
            if let Err((code, message)) = self.try_accept(spec) {
                self.counters.rejected += 1;
                rejections.push(Rejection {
                    request_id,
                    code,
                    message,
                });
            }
        }
        rejections
    }

    fn try_accept(&mut self, mut spec: RequestSpec) -> std::result::Result<(), Refusal> {
        self.check_prompt(&mut spec)?;
        self.check_deadline(&spec)?;
        let request = Request::new(spec, self.next_sequence);
        if let Some((pool, units, capacity)) = self.never_fits(&request) {
            let message = format!(
                "the request needs {units} units of pool {}, which has {capacity}; shorten the \
                 prompt or max_new_tokens",
                pool.name()
            );
            return Err(("pool_capacity_exceeded", message));
        }
        self.make_place(&request)?;
        self.accept(request)
            .map_err(|error| ("internal_error", error.to_string()))
    }

    fn check_prompt(&self, spec: &mut RequestSpec) -> std::result::Result<(), Refusal> {
        let config = &self.config;
        if self.requests.find(spec.request_id).is_some() {
            let message = format!("request {} is known and has not ended", spec.request_id);
            return Err(("duplicate_request_id", message));
        }
        let given = spec.token_ids.len() as u64;
        let prompt_len = spec.prompt_len.map_or(given, u64::from);
        if prompt_len == 0 {
            return Err(("empty_prompt", "the prompt has no tokens".to_owned()));
        }
        if prompt_len < given {
            let message = format!("prompt_len is {prompt_len}, {given} token ids are given");
            return Err(("invalid_value", message));
        }
        self.check_ids(&spec.token_ids)?;
        self.check_ids(&spec.stop_token_ids)?;
        let drafts = config.draft_len;
        if let Some(wanted) = spec.draft_len.filter(|wanted| *wanted > drafts) {
            let message =
                format!("draft_len is {wanted}, the server drafts at most {drafts} tokens");
            return Err(("invalid_draft_len", message));
        }
        let priority = &config.priority;
        if spec.priority.is_some() && priority.refuse_when_disabled && !priority.enabled {
            let message = "priorities are not enabled on this server; leave the field out";
            return Err(("priority_disabled", message.to_owned()));
        }
        let prompt_len = if config.auto_truncate {
            truncate(spec, prompt_len, config)
        } else {
            prompt_len
        };
        let limit = config.context_length;
        let total = prompt_len + u64::from(spec.max_new_tokens);
        if total > u64::from(limit) {
            let message = format!(
                "the prompt has {prompt_len} tokens and max_new_tokens is {}: {total} exceed the \
                 context length of {limit}; shorten either",
                spec.max_new_tokens
            );
            return Err(("context_length_exceeded", message));
        }
        Ok(())
    }

    /// Refuses ids outside the vocabulary.
    pub(crate) fn check_ids(&self, ids: &[u32]) -> std::result::Result<(), Refusal> {
        let vocab_size = self.config.vocab_size;
        let largest = ids.iter().copied().fold(0, u32::max);
        if largest < vocab_size {
            return Ok(());
        }
        let message = format!("token id {largest} is outside the vocabulary of {vocab_size}");
        Err(("invalid_token_id", message))
    }

    fn check_deadline(&mut self, spec: &RequestSpec) -> std::result::Result<(), Refusal> {
        let Some(deadline_us) = spec.deadline_us else {
            return Ok(());
        };
        let now_us = self.now_us.max(spec.arrival_us);
        if deadline_us <= now_us {
            let message = "the request's deadline passed before it could be queued".to_owned();
            return Err(("deadline_exceeded", message));
        }
        let is_late = |start_us: &u64| *start_us > deadline_us;
        let mut start_us = self.estimated_start_us(spec).filter(is_late);
        if start_us.is_some() {
            // Prompts that nobody looked up yet count in full; what the cache holds of them is free.
            self.look_up_queue();
            start_us = self.estimated_start_us(spec).filter(is_late);
        }
        if let Some(start_us) = start_us {
            let message = format!(
                "the request would start in about {} ms, after its deadline in {} ms; try later or \
                 give it more time",
                (start_us - now_us) / 1000,
                (deadline_us - now_us) / 1000
            );
            return Err(("deadline_unreachable", message));
        }
        Ok(())
    }

    /// Makes sure that the queue has a place for the request.
    fn make_place(&mut self, request: &Request) -> std::result::Result<(), Refusal> {
        let limit = self.config.max_queued_requests.map(|limit| limit as usize);
        if limit.is_none_or(|limit| self.num_queued() < limit) {
            return Ok(());
        }
        let class = self.class_of(&request.spec);
        // A retracted request has output that somebody reads.
        let last = self.waiting.last_new();
        if let Some((_, key)) = last.filter(|(place, _)| place.class > class) {
            return self
                .end_request(key, FinishCode::Dropped, None)
                .map_err(|error| ("internal_error", error.to_string()));
        }
        let message = format!("{} requests are waiting; try later", self.num_queued());
        Err(("queue_full", message))
    }

    fn accept(&mut self, request: Request) -> Result<()> {
        self.next_sequence += 1;
        self.counters.submitted += 1;
        let is_whole = request.len() == request.prompt_len;
        let wants_nothing = request.spec.max_new_tokens == 0;
        let key = self.requests.insert(request);
        if is_whole || wants_nothing {
            self.join_queue(key);
        } else {
            self.start_receiving(key);
        }
        if wants_nothing {
            return self.end_request(key, FinishCode::Length, None);
        }
        self.start_waiting_timers(key);
        Ok(())
    }

    /// A request whose prompt is whole takes its place among those that wait.
    pub(crate) fn join_queue(&mut self, key: Key) {
        // Token ids are what this crate is given, so the first moves are made at once.
        self.move_on(key, Lifecycle::tokenize);
        self.move_on(key, Lifecycle::queue);
        let request = self.requests.live(key);
        let (class, sequence) = (self.class_of(&request.spec), request.sequence);
        let place = self.waiting.push(class, sequence, key);
        self.requests.live_mut(key).waiting.place = place;
        self.note_waiting(key);
    }

    /// Requests in the queue, or on their way into it.
    fn num_queued(&self) -> usize {
        self.waiting.len() + self.num_receiving
    }
}

/// Cuts the end of a prompt that leaves no room for its output, in the context or in the pool of
/// pages; returns its length.
fn truncate(spec: &mut RequestSpec, prompt_len: u64, config: &SchedulerConfig) -> u64 {
    let context = (config.context_length).saturating_sub(spec.max_new_tokens);
    let beside = u64::from(spec.max_new_tokens.saturating_sub(1)) + u64::from(config.overshoot());
    let pool = u64::from(config.num_pages) * u64::from(config.page_size);
    let room = u32::try_from(pool.saturating_sub(beside)).map_or(context, |pool| pool.min(context));
    if room == 0 || prompt_len <= u64::from(room) {
        return prompt_len;
    }
    spec.token_ids.truncate(room as usize);
    spec.prompt_len = spec.prompt_len.map(|_| room);
    u64::from(room)
}
