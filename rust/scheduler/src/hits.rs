//! What the cache holds of each waiting prompt, kept up incrementally (`serving.md` a.5).
//!
//! A waiting request remembers its match. The match gets longer only when the tree grows exactly
//! where it ends, with the page that follows in the prompt: the request watches for that page, by
//! name. It gets shorter only when its node is evicted, which the node's handle tells.
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use crate::prefill::usable_hit;
use crate::queue::Place;
use crate::request::Request;
use crate::scheduler::Scheduler;
use crate::state::State;
use crate::table::Key;

/// Waiting requests whose prompt is looked up again in one step; the rest keep a stale order.
pub(crate) const MAX_REMATCHES: usize = 128;
/// Waiting requests whose match is checked in one step after an eviction, which takes no lookup.
const MAX_CHECKS: usize = 1024;
/// Steps between two touches of what waiting requests will need.
const HOLD_INTERVAL: u64 = 32;
/// Requests to look up that may be left over before the dead ones are swept out.
const SPARE_STALE: usize = 256;
/// Watches that may be left over before the dead ones are swept out.
const SPARE_WATCHES: usize = 1024;

/// Who must look again, and who waits for which page.
#[derive(Debug, Default)]
pub(crate) struct Hits {
    stale: VecDeque<Key>,
    watchers: HashMap<u64, Vec<Key>>,
    /// Entries of `watchers`, dead ones included.
    num_watches: usize,
    /// Requests to check since something was evicted, from which place on.
    unchecked: usize,
    checked_to: Place,
    names: PageNames,
}

/// Names pages, with a key that clients do not know: prompts made to share names would wake all
/// who wait at each insert. Names are compared within a scheduler only, so no plan depends on it.
#[derive(Debug)]
struct PageNames {
    key: u64,
}

impl Default for PageNames {
    fn default() -> Self {
        Self {
            key: RandomState::new().hash_one(0_u64) | 1,
        }
    }
}

impl PageNames {
    /// Name of the page that follows the first `len` tokens of a prompt.
    fn of(&self, len: u32, page: &[u32]) -> u64 {
        page.iter().fold(u64::from(len) ^ self.key, |name, id| {
            let mixed = (name ^ u64::from(*id)).wrapping_mul(self.key);
            mixed ^ (mixed >> 32)
        })
    }
}

impl Scheduler {
    /// A request joined the queue: its prompt must be looked up.
    pub(crate) fn note_waiting(&mut self, key: Key) {
        let request = self.requests.live_mut(key);
        request.waiting.is_stale = true;
        request.waiting.counted = request.uncached_len();
        request.waiting.prefilled_before = self.counters.prefill_tokens;
        let waiting = &request.waiting;
        self.queued_tokens.add(waiting.place.class, waiting.counted);
        if self.config.fair {
            self.fairness.note_waiting(request.spec.tenant);
        }
        self.look_again(key);
    }

    /// Lists a request whose prompt must be looked up before it is ordered by what the cache holds
    /// of it. Policies that do not order by that look when they admit.
    fn look_again(&mut self, key: Key) {
        if self.config.policy.is_cache_aware() && self.config.uses_tree() {
            self.hits.stale.push_back(key);
            self.sweep_stale();
        }
    }

    /// Most entries of the list of those to look up again: more are of requests that left the queue.
    pub(crate) fn most_stale(&self) -> usize {
        2 * self.waiting.len() + SPARE_STALE
    }

    pub(crate) fn num_stale(&self) -> usize {
        self.hits.stale.len()
    }

    /// Forgets those of the list that need no lookup any more, once they are many.
    fn sweep_stale(&mut self) {
        if self.hits.stale.len() <= self.most_stale() {
            return;
        }
        let requests = &self.requests;
        let mut seen = HashSet::new();
        self.hits.stale.retain(|key| {
            let waits =
                |request: &Request| request.state() == State::Waiting && request.waiting.is_stale;
            requests.get(*key).is_some_and(waits) && seen.insert(*key)
        });
    }

    /// Takes a request out of the queue; its match stays with the caller.
    pub(crate) fn leave_queue(&mut self, key: Key) {
        let request = self.requests.live(key);
        let waiting = &request.waiting;
        self.queued_tokens
            .remove(waiting.place.class, waiting.counted);
        self.waiting.remove(request.waiting.place);
        if self.config.fair {
            self.fairness.note_left(request.spec.tenant);
        }
        self.sweep_stale();
    }

    /// The tree grew by `tokens[start..]`, under a prefix that it held: wakes who waits for that.
    pub(crate) fn note_growth(&mut self, tokens_key: Key, start: u32) {
        if self.hits.watchers.is_empty() {
            return;
        }
        let (first, page_size) = (start as usize, self.config.page_size as usize);
        let tokens = &self.requests.live(tokens_key).tokens;
        let name = self.hits.names.of(start, &tokens[first..first + page_size]);
        let Some(woken) = self.hits.watchers.remove(&name) else {
            return;
        };
        self.hits.num_watches -= woken.len();
        for key in woken {
            let request = self.requests.get_mut(key);
            let is_watching = |waiting: &crate::request::WaitingInfo| waiting.watch == Some(name);
            if let Some(request) = request.filter(|request| is_watching(&request.waiting)) {
                request.waiting.watch = None;
                if !std::mem::replace(&mut request.waiting.is_stale, true) {
                    self.look_again(key);
                }
            }
        }
    }

    /// Looks up prompts whose match may have changed, [`MAX_REMATCHES`] at most.
    pub(crate) fn refresh_hits(&mut self) {
        let num_evictions = self.counters.evicted_pages + self.counters.flushed_pages;
        if self.num_evictions_seen != num_evictions {
            self.num_evictions_seen = num_evictions;
            self.hits.unchecked = self.waiting.len();
        }
        if self.hits.unchecked > 0 {
            self.find_evicted();
        }
        let mut left = MAX_REMATCHES;
        while left > 0 {
            let Some(key) = self.hits.stale.pop_front() else {
                break;
            };
            let waits =
                |request: &Request| request.state() == State::Waiting && request.waiting.is_stale;
            if self.requests.get(key).is_some_and(waits) {
                self.rematch(key);
                left -= 1;
            }
        }
    }

    /// Marks the waiting requests whose matched node is gone: the next [`MAX_CHECKS`] of the queue.
    fn find_evicted(&mut self) {
        let count = self.hits.unchecked.min(MAX_CHECKS);
        self.hits.unchecked -= count;
        let part = self.waiting.round_from(self.hits.checked_to).take(count);
        for (place, key) in part {
            self.hits.checked_to = place;
            let request = self.requests.live(key);
            if !request.waiting.is_stale && !self.match_holds(request) {
                self.requests.live_mut(key).waiting.is_stale = true;
                self.hits.stale.push_back(key);
            }
        }
        self.sweep_stale();
    }

    /// Looks the prompt up unless its match still holds.
    pub(crate) fn ensure_match(&mut self, key: Key) {
        if !self.config.uses_tree() {
            return;
        }
        let request = self.requests.live(key);
        if request.waiting.is_stale || !self.match_holds(request) {
            self.rematch(key);
        }
    }

    /// Looks up the first of the waiting prompts that were not, so that their uncached tokens are known.
    pub(crate) fn look_up_queue(&mut self) {
        let requests = &self.requests;
        let is_stale = |key: &Key| requests.live(*key).waiting.is_stale;
        let first = self.waiting.iter().filter(is_stale).take(MAX_CHECKS);
        let keys: Vec<Key> = first.collect();
        for key in keys {
            self.ensure_match(key);
        }
    }

    /// Whether a lookup would give what the request remembers.
    fn match_holds(&self, request: &Request) -> bool {
        let matchable = &request.tokens[..request.tokens.len() - 1];
        let matched = request.waiting.matched.as_ref();
        matched.is_some_and(|matched| self.cache.is_current(matched, matchable))
    }

    fn rematch(&mut self, key: Key) {
        let page_size = self.config.page_size as usize;
        self.counters.rematches += 1;
        let request = self.requests.live_mut(key);
        let known = request.waiting.matched.take();
        let matchable = &request.tokens[..request.tokens.len() - 1];
        let matched = self
            .cache
            .look_up(&request.spec.namespace, matchable, known);
        let start = matched.cached_len as usize;
        let next_page = matchable.get(start..start + page_size);
        let names = &self.hits.names;
        let watch = next_page.map(|page| names.of(matched.cached_len, page));
        let is_new_watch = watch != request.waiting.watch;
        let before = request.waiting.counted;
        request.waiting.hit = usable_hit(matched.cached_len, request, &self.config);
        request.waiting.matched = Some(matched);
        request.waiting.is_stale = false;
        request.waiting.watch = watch;
        request.waiting.counted = request.uncached_len();
        let (class, after) = (request.waiting.place.class, request.waiting.counted);
        self.queued_tokens.add(class, after);
        self.queued_tokens.remove(class, before);
        if let Some(name) = watch.filter(|_| is_new_watch) {
            self.hits.watchers.entry(name).or_default().push(key);
            self.hits.num_watches += 1;
            if self.hits.num_watches > 4 * self.waiting.len() + SPARE_WATCHES {
                self.sweep_watches();
            }
        }
    }

    /// Forgets the watches of requests that left the queue or watch for another page.
    fn sweep_watches(&mut self) {
        let requests = &self.requests;
        self.hits.watchers.retain(|name, keys| {
            keys.retain(|key| {
                let request = requests.get(*key);
                request.is_some_and(|request| request.waiting.watch == Some(*name))
            });
            !keys.is_empty()
        });
        self.hits.num_watches = self.hits.watchers.values().map(Vec::len).sum();
    }

    /// Every so many steps, marks what the first waiting requests will hit as just used, the first
    /// of them last, so that eviction takes it last.
    pub(crate) fn hold_recent(&mut self) -> crate::error::Result<()> {
        let is_due = self.in_flight.next_id().is_multiple_of(HOLD_INTERVAL);
        if !is_due || self.waiting.is_empty() || !self.config.uses_tree() {
            return Ok(());
        }
        let mut order = std::mem::take(&mut self.scratch);
        self.order_waiting(&mut order, MAX_REMATCHES);
        order.truncate(MAX_REMATCHES);
        for key in order.iter().rev() {
            self.ensure_match(*key);
            let waiting = &self.requests.live(*key).waiting;
            if let Some(matched) = waiting.matched.as_ref().filter(|m| m.cached_len > 0) {
                let receipt = self.cache.lock(matched.node)?;
                self.cache.unlock(receipt);
            }
        }
        self.scratch = order;
        Ok(())
    }
}
