//! Prompts that come in parts: no call works on a million ids, each part is checked and looked up
//! as it comes.
use crate::event::Rejection;
use crate::scheduler::Scheduler;
use crate::state::{Lifecycle, State};
use crate::table::Key;

impl Scheduler {
    /// Takes the next ids of a prompt that was submitted in part ([`RequestSpec::prompt_len`]).
    ///
    /// With the last of them the request joins the queue, at the place of its arrival. What goes
    /// beyond the length is ignored, and so are parts for a request that ended.
    ///
    /// Returns the refusal if an id is outside the vocabulary: the request is forgotten then, and
    /// has no terminal output.
    ///
    /// [`RequestSpec::prompt_len`]: crate::RequestSpec::prompt_len
    pub fn extend_prompt(&mut self, request_id: u64, token_ids: &[u32]) -> Option<Rejection> {
        let key = self.requests.find(request_id)?;
        let request = self.requests.live(key);
        if request.state() != State::Received {
            return None;
        }
        let missing = (request.prompt_len - request.len()) as usize;
        let part = &token_ids[..token_ids.len().min(missing)];
        if let Err((code, message)) = self.check_ids(part) {
            self.forget(key);
            return Some(Rejection {
                request_id,
                code,
                message,
            });
        }
        let request = self.requests.live_mut(key);
        request.tokens.extend_from_slice(part);
        if request.len() == request.prompt_len {
            self.num_receiving -= 1;
            self.join_queue(key);
        } else {
            self.look_up_part(key);
        }
        None
    }

    /// A request was accepted whose prompt is not whole yet.
    pub(crate) fn start_receiving(&mut self, key: Key) {
        self.num_receiving += 1;
        self.look_up_part(key);
    }

    /// Finds what the tree holds of a prompt so far, so that only the rest is left to be found.
    fn look_up_part(&mut self, key: Key) {
        let request = self.requests.live_mut(key);
        if !self.config.uses_tree() {
            return;
        }
        let known = request.waiting.matched.take();
        let namespace = &request.spec.namespace;
        request.waiting.matched = Some(self.cache.look_up(namespace, &request.tokens, known));
    }

    /// Takes a request whose prompt is not whole out of the table, as if it had been refused.
    fn forget(&mut self, key: Key) {
        self.move_on(key, Lifecycle::abort);
        self.move_on(key, Lifecycle::complete);
        self.remove(key);
        self.num_receiving -= 1;
        self.counters.submitted -= 1;
        self.counters.rejected += 1;
    }

    /// Prompts of which parts are missing.
    #[must_use]
    pub fn num_receiving(&self) -> usize {
        self.num_receiving
    }
}
