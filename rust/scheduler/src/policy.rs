//! The order in which waiting requests are considered for admission (`serving.md` a.5).
use std::collections::HashMap;

use crate::config::Policy;
use crate::request::Request;
use crate::scheduler::Scheduler;
use crate::table::Key;

/// Order of one request: its priority class, then retracted before aged before all others, then
/// what the policy says, then the queue's order. Smaller goes first.
pub(crate) type SortKey = (i64, u8, u64, i64);

const RETRACTED: u8 = 0;
const AGED: u8 = 1;
const USUAL: u8 = 2;

/// Bits after the point of the ratio that `Hrrn` orders by.
const RATIO_BITS: u32 = 16;

/// Scrambles a word, so that its low bits depend on all of it.
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let word = (word ^ (word >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ (word >> 33)
}

impl Scheduler {
    /// Fills `order` with waiting requests, most deserving first: all of them, or the first `most`
    /// at least.
    pub(crate) fn order_waiting(&mut self, order: &mut Vec<Key>, most: usize) {
        order.clear();
        if self.config.policy == Policy::Fcfs {
            order.extend(self.waiting.iter().take(most));
            return;
        }
        if self.config.policy.is_cache_aware() && self.config.uses_tree() {
            self.refresh_hits();
        }
        let mut entries = std::mem::take(&mut self.sort_entries);
        entries.clear();
        let tree_ranks = if self.config.policy == Policy::DfsWeight {
            self.tree_ranks()
        } else {
            Vec::new()
        };
        for (index, key) in self.waiting.iter().enumerate() {
            let request = self.requests.live(key);
            let wish = match tree_ranks.get(index) {
                Some(rank) => u64::from(*rank),
                None => self.policy_key(request),
            };
            let place = request.waiting.place;
            let group = if place.is_retracted() {
                RETRACTED
            } else if self.is_aged(request) {
                AGED
            } else {
                USUAL
            };
            let wish = if group == USUAL { wish } else { 0 };
            entries.push(((place.class, group, wish, place.rank), key));
        }
        if most < entries.len() / 4 {
            entries.select_nth_unstable(most);
            entries.truncate(most);
        }
        entries.sort_unstable();
        order.extend(entries.iter().map(|(_, key)| *key));
        self.sort_entries = entries;
    }

    /// Whether a request was overtaken so often that nobody may overtake it any more.
    pub(crate) fn is_aged(&self, request: &Request) -> bool {
        self.config.policy.bounds_overtaking()
            && request.waiting.overtaken >= self.config.max_overtake
    }

    /// What the policy orders by, smaller first.
    fn policy_key(&self, request: &Request) -> u64 {
        let waiting = &request.waiting;
        match self.config.policy {
            Policy::Fcfs | Policy::DfsWeight => 0,
            Policy::Lpm => u64::from(u32::MAX - waiting.hit),
            Policy::Hrrn => {
                let waited = self.counters.prefill_tokens - waiting.prefilled_before;
                let ratio = (waited << RATIO_BITS) / u64::from(request.uncached_len());
                u64::MAX - ratio
            }
            Policy::ShortestPrefillFirst => u64::from(request.uncached_len()),
            Policy::Lof => u64::from(u32::MAX - request.spec.max_new_tokens),
            Policy::Random => mix(self.config.policy_seed ^ mix(request.sequence)),
        }
    }

    /// Counts, for each waiting request, the later ones of its class (and tenant) that were
    /// admitted before it.
    ///
    /// One pass over each class: `admitted` is sorted.
    pub(crate) fn count_overtaking(&mut self, admitted: &mut [(i64, i64, u64)]) {
        if !self.config.policy.bounds_overtaking() {
            return;
        }
        admitted.sort_unstable();
        let by_tenant = self.config.fair;
        for of_class in admitted.chunk_by(|one, next| one.0 == next.0) {
            // How many of them are later than the request at hand.
            let mut later: HashMap<u64, u32> = HashMap::new();
            let name = |tenant: u64| if by_tenant { tenant } else { 0 };
            for (_, _, tenant) in of_class {
                *later.entry(name(*tenant)).or_default() += 1;
            }
            let mut earlier = of_class.iter().peekable();
            let (class, last_rank, _) = of_class[of_class.len() - 1];
            for key in self.waiting.before(class, last_rank) {
                let request = self.requests.live_mut(key);
                let rank = request.waiting.place.rank;
                while let Some((_, _, tenant)) = earlier.next_if(|other| other.1 < rank) {
                    *later.entry(name(*tenant)).or_default() -= 1;
                }
                let count = later.get(&name(request.spec.tenant));
                request.waiting.overtaken += count.copied().unwrap_or(0);
            }
        }
    }

    /// Counts for those skipped in this step that one of another class, or tenant, went before
    /// them: what [`Scheduler::count_overtaking`] does not see.
    pub(crate) fn count_passing(&mut self, skipped: &[Key], class: i64, tenant: u64) {
        if !self.config.policy.bounds_overtaking() {
            return;
        }
        for key in skipped {
            let request = self.requests.live_mut(*key);
            let is_of_other_tenant = self.config.fair && request.spec.tenant != tenant;
            if request.waiting.place.class != class || is_of_other_tenant {
                request.waiting.overtaken += 1;
            }
        }
    }

    /// How many requests of the queue admission may look at in one step.
    pub(crate) fn most_candidates(&self) -> usize {
        self.free_slots.len() + MAX_CANDIDATES_PASSED
    }
}

/// Waiting requests that a step may pass over, held back or too large.
const MAX_CANDIDATES_PASSED: usize = 128;
