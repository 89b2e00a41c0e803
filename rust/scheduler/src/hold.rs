//! Duplicates: a prompt waits while another one computes a prefix of it, which it can then hit
//! (`serving.md` a.5).
use crate::prefill::usable_hit;
use crate::request::{len_u32, Request};
use crate::scheduler::Scheduler;
use crate::table::Key;

impl Scheduler {
    /// Whether to leave a request waiting in this step for the pages of one that is computed now.
    ///
    /// Each step counts once, and a request waits `inbatch_prefix_hold` steps at most.
    pub(crate) fn hold_back(&mut self, key: Key) -> bool {
        let step_id = self.record.step_id;
        let waiting = &self.requests.live(key).waiting;
        let is_counted = waiting.held_step == step_id;
        let may_wait = is_counted || waiting.holds < self.config.inbatch_prefix_hold;
        if self.fresh.is_empty() || !may_wait || !self.config.uses_tree() {
            return false;
        }
        self.ensure_match(key);
        let request = self.requests.live(key);
        let held = request.waiting.matched.as_ref();
        let cached_len = held.map_or(0, |matched| matched.cached_len);
        let gains = self.fresh.iter().any(|other| {
            let other = self.requests.live(*other);
            let shared = shared_len(request, other, cached_len, self.config.page_size);
            usable_hit(shared, request, &self.config) > request.waiting.hit
        });
        if gains && !is_counted {
            let waiting = &mut self.requests.live_mut(key).waiting;
            waiting.holds += 1;
            waiting.held_step = step_id;
            self.counters.held_back += 1;
        }
        gains
    }
}

/// Tokens in whole pages that `request` can take from `other` once that has computed its prompt;
/// 0 if they are not more than the `cached_len` tokens that the cache holds already.
fn shared_len(request: &Request, other: &Request, cached_len: u32, page_size: u32) -> u32 {
    let (start, page) = (cached_len as usize, page_size as usize);
    let ours = &request.tokens[..];
    let theirs = &other.tokens[..other.prefill_len as usize];
    let next = (ours.get(start..start + page)).zip(theirs.get(start..start + page));
    let goes_on = next.is_some_and(|(ours, theirs)| ours == theirs);
    let is_shared = goes_on
        && request.spec.namespace == other.spec.namespace
        && ours[..start] == theirs[..start];
    if !is_shared {
        return 0;
    }
    let pairs = ours[start..]
        .chunks_exact(page)
        .zip(theirs[start..].chunks_exact(page));
    let pages = pairs.take_while(|(ours, theirs)| ours == theirs).count();
    cached_len + len_u32(pages) * page_size
}
