//! Preemption: a waiting request takes the place of running ones that are less urgent by enough
//! (`serving.md` a.6).
use std::cmp::Reverse;

use crate::admit::Reserved;
use crate::error::Result;
use crate::pool::{Need, Pool};
use crate::request::RequestSpec;
use crate::scheduler::Scheduler;
use crate::table::Key;

impl Scheduler {
    /// Priority class of a request, the most urgent one is the smallest. No priority is the least
    /// urgent.
    pub(crate) fn class_of(&self, spec: &RequestSpec) -> i64 {
        if !self.config.priority.enabled {
            return 0;
        }
        match spec.priority {
            None => i64::MAX,
            Some(priority) if self.config.priority.low_values_first => i64::from(priority),
            Some(priority) => -i64::from(priority),
        }
    }

    /// Whether waiting requests may retract running ones.
    pub(crate) fn preempts(&self) -> bool {
        self.config.priority.enabled && self.config.priority.preemption
    }

    /// Retracts the least urgent and newest running requests if that frees what `key` lacks, and no
    /// more of them than it takes; says whether any was retracted.
    ///
    /// What is on its way back already is counted: then nobody needs to be retracted.
    pub(crate) fn preempt_for(
        &mut self,
        key: Key,
        need: Need,
        reserved: &mut Reserved,
    ) -> Result<bool> {
        if !self.preempts() {
            return Ok(false);
        }
        // What the request itself hits comes back to nobody.
        let receipt = match self.exact_match(key, need.shared) {
            Some(found) => Some(self.cache.lock(found.node)?),
            None => None,
        };
        let victims = self.victims_for(key, need, reserved);
        if let Some(receipt) = receipt {
            self.cache.unlock(receipt);
        }
        for victim in &victims {
            self.retract(*victim)?;
            self.counters.preempted += 1;
        }
        if !victims.is_empty() {
            // Who goes on expects another share of its limit now.
            *reserved = Reserved::default();
            // A later look at the queue in this step could bring a victim back beside its own row.
            self.has_retracted = true;
        }
        Ok(!victims.is_empty())
    }

    /// Whom to retract for `key`: nobody if that is not enough, or not needed.
    fn victims_for(&self, key: Key, need: Need, reserved: &mut Reserved) -> Vec<Key> {
        let full = self.pool_use(Pool::Full);
        let wanted =
            Pool::Full.need(need, self.config.page_size) + self.set_aside(Pool::Full, reserved);
        let mut pages_lacking = i64::from(wanted) - i64::from(full.free + full.evictable)
            + i64::from(full.promised)
            - i64::from(self.quarantine.num_returning());
        let returning_slots = self.quarantine.num_slots() > 0;
        let mut lacks_slot = self.free_slots.is_empty() && !returning_slots;
        let mut victims = Vec::new();
        for victim in self.preemptable(key) {
            if pages_lacking <= 0 && !lacks_slot {
                break;
            }
            let request = self.requests.live(victim);
            pages_lacking -= i64::from(self.returned_pages(request));
            lacks_slot = false;
            victims.push(victim);
        }
        if pages_lacking > 0 || lacks_slot {
            victims.clear();
        }
        victims
    }

    /// Running requests that `key` may retract, in the order in which it would. Those that the
    /// steps in flight finish are not among them, nor those with prompt rows in this step.
    fn preemptable(&self, key: Key) -> Vec<Key> {
        let class = self.class_of(&self.requests.live(key).spec);
        let threshold = i64::from(self.config.priority.preemption_threshold);
        let class_of = |key: &Key| self.class_of(&self.requests.live(*key).spec);
        let mut victims: Vec<Key> = self
            .running
            .iter()
            .copied()
            .filter(|victim| {
                let request = self.requests.live(*victim);
                let is_less_urgent = class_of(victim).saturating_sub(class) > threshold;
                let is_planned = request.last_step == self.record.step_id;
                is_less_urgent && !is_planned && !request.ends_by_length()
            })
            .collect();
        victims.sort_by_key(|victim| {
            let sequence = self.requests.live(*victim).sequence;
            Reverse((class_of(victim), sequence))
        });
        victims
    }
}
