//! The order in which waiting requests are considered for admission.
use std::cmp::Reverse;

use crate::config::Policy;
use crate::scheduler::Scheduler;
use crate::table::Key;

/// Waiting requests whose hit length is looked up again in one step; the rest keep a stale order.
const MAX_REMATCHES: usize = 128;
/// Times a request may be overtaken before it goes to the head of the queue.
const MAX_OVERTAKEN: u32 = 512;

impl Scheduler {
    /// Fills `order` with the waiting requests, most deserving first.
    ///
    /// Retracted requests stay at the front under every policy.
    pub(crate) fn order_waiting(&mut self, order: &mut Vec<Key>) {
        order.clear();
        if self.config.policy == Policy::Fcfs {
            // First come, first served stops at the first request that does not fit, and admits at
            // most one per free slot: a long queue need not be copied. Held ones are skipped.
            let enough = self.free_slots.len() + MAX_REMATCHES;
            order.extend(self.waiting.iter().take(enough));
            return;
        }
        order.extend(self.waiting.iter());
        self.refresh_hits(order);
        let requests = &self.requests;
        let first = self.waiting.num_retracted();
        order[first..].sort_by_key(|key| {
            let request = requests.live(*key);
            (
                request.waiting.overtaken <= MAX_OVERTAKEN,
                Reverse(request.waiting.hit),
                request.sequence,
            )
        });
    }

    /// Counts, for each waiting request that arrived earlier, that `sequence` went before it.
    pub(crate) fn count_overtaking(&mut self, sequence: u64) {
        if self.config.policy == Policy::Fcfs {
            return;
        }
        for index in 0..self.waiting.len() {
            let Some(key) = self.waiting.get(index) else {
                break;
            };
            let request = self.requests.live_mut(key);
            if request.sequence < sequence {
                request.waiting.overtaken += 1;
            }
        }
    }

    fn refresh_hits(&mut self, order: &[Key]) {
        let version = self.tree_version;
        let mut left = MAX_REMATCHES;
        for key in order {
            if left == 0 {
                break;
            }
            let request = self.requests.live_mut(*key);
            if request.waiting.hit_version == Some(version) {
                continue;
            }
            left -= 1;
            let matchable = request.tokens.len() - 1;
            request.waiting.hit = self
                .cache
                .match_dry_run(&request.spec.namespace, &request.tokens[..matchable]);
            request.waiting.hit_version = Some(version);
        }
    }
}
