//! New requests: what is refused at once, and with which code.
use crate::event::{FinishCode, Rejection};
use crate::request::{Request, RequestSpec};
use crate::scheduler::Scheduler;

impl Scheduler {
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
}
