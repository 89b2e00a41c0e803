//! Admission: match, lock, allocate, or a reason why not.
use crate::budget::Budget;
use crate::config::Policy;
use crate::error::Result;
use crate::pool::{Need, Pool, POOLS};
use crate::prefill::{chunk_end, usable_hit, Progress};
use crate::request::Request;
use crate::scheduler::Scheduler;
use crate::state::State;
use crate::table::Key;

/// Requests that do not fit and may be passed over in one step, under cache-aware policies.
const MAX_SKIPS: u32 = 8;
/// Steps a request waits at most for another one with the same prefix.
const MAX_HOLDS: u8 = 2;

/// What became of an attempt to admit a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    Admitted,
    /// The step has too few rows left.
    StepFull,
    /// A pool has too little left.
    NoUnits,
}

/// Pages set aside for the requests that run, counted once per step.
#[derive(Debug, Default)]
struct Reserved {
    pages: Option<u32>,
}

impl Scheduler {
    /// Admits waiting requests in policy order while the step and the pools have room.
    pub(crate) fn admit_waiting(&mut self, budget: &mut Budget) -> Result<()> {
        if self.free_slots.is_empty() || budget.rows() == 0 {
            return Ok(());
        }
        let mut order = std::mem::take(&mut self.scratch);
        self.order_waiting(&mut order);
        let mut reserved = Reserved::default();
        let mut skips = 0;
        for key in order.iter().copied() {
            if budget.rows() == 0 || self.free_slots.is_empty() {
                break;
            }
            if self.hold_back(key) {
                continue;
            }
            match self.try_admit(key, budget, &mut reserved)? {
                Attempt::Admitted => {}
                Attempt::StepFull => break,
                Attempt::NoUnits => {
                    skips += 1;
                    if self.config.policy == Policy::Fcfs || skips > MAX_SKIPS {
                        break;
                    }
                }
            }
        }
        self.scratch = order;
        Ok(())
    }

    fn try_admit(
        &mut self,
        key: Key,
        budget: &mut Budget,
        reserved: &mut Reserved,
    ) -> Result<Attempt> {
        self.refresh_match(key);
        let request = self.requests.live(key);
        let prefill_len = request.len();
        let matched = request.waiting.matched.as_ref().map(|(_, found)| found);
        let hit = matched.map_or(0, |found| found.cached_len);
        let replay = self.config.window.min(hit);
        let progress = Progress {
            prefill_len,
            hit,
            computed: hit,
            replay,
        };
        let page_size = self.config.page_size;
        let Some(end) = chunk_end(progress, page_size, self.config.window, budget) else {
            return Ok(Attempt::StepFull);
        };
        let is_open = end < prefill_len;
        if (is_open && self.carried.is_some()) || !budget.allows(end - hit, hit / page_size) {
            return Ok(Attempt::StepFull);
        }
        let receipt = match matched {
            Some(found) if hit > 0 => Some(self.cache.lock(found.node)?),
            _ => None,
        };
        let expected = self.ratio.expected(self.requests.live(key));
        let need = Need {
            computed: prefill_len + expected.saturating_sub(1),
            shared: hit,
        };
        if !self.fits_now(need, reserved) {
            if let Some(receipt) = receipt {
                self.cache.unlock(receipt);
            }
            return Ok(Attempt::NoUnits);
        }
        let own_pages = prefill_len.div_ceil(page_size) - hit / page_size;
        if let Some(pages) = reserved.pages.as_mut() {
            *pages += Pool::Full.need(need, page_size) - own_pages;
        }

        self.waiting.remove(key);
        let slot = self.free_slots.pop().expect("fits_now saw a free slot");
        let request = self.requests.live_mut(key);
        let found = request.waiting.matched.take().map(|(_, found)| found);
        request.pages = found
            .filter(|_| hit > 0)
            .map_or_else(Vec::new, |found| found.pages);
        request.receipt = receipt;
        start_admission(
            request,
            slot,
            hit,
            replay,
            self.config.decoder_replay,
            self.config.window,
        );
        self.allocate_pages(key, own_pages);
        self.note_admission(key, hit);
        self.enter(key, State::Prefilling);
        budget.take(0, 0, hit / page_size);
        self.push_chunk(key, end, replay, budget);
        if is_open {
            self.carried = Some(key);
        } else {
            self.enter(key, State::Running);
            self.running.push(key);
        }
        Ok(Attempt::Admitted)
    }

    /// Whether each pool has what `need` asks for on top of what running requests are expected to
    /// take.
    fn fits_now(&self, need: Need, reserved: &mut Reserved) -> bool {
        POOLS.iter().all(|pool| {
            let set_aside = match pool {
                Pool::Full => *reserved.pages.get_or_insert_with(|| self.expected_pages()),
                Pool::Window | Pool::ReqSlots => 0,
            };
            let units = pool.need(need, self.config.page_size);
            self.pool_use(*pool).available() >= units + set_aside
        })
    }

    /// Pages that the requests with a slot are expected to take beyond those they have.
    fn expected_pages(&self) -> u32 {
        let page_size = self.config.page_size;
        let holding = self.running.iter().chain(&self.carried);
        holding
            .map(|key| {
                let request = self.requests.live(*key);
                let coming = request.pending_tokens + self.ratio.expected(request);
                let computed = request.len() + coming.saturating_sub(1);
                computed
                    .div_ceil(page_size)
                    .saturating_sub(crate::request::len_u32(request.pages.len()))
            })
            .sum()
    }

    /// Appends `count` pages to a request. Admission and decode made sure that they exist.
    pub(crate) fn allocate_pages(&mut self, key: Key, count: u32) {
        let shortage = count.saturating_sub(self.cache.num_free());
        if shortage > 0 {
            self.evict(shortage);
        }
        let request = self.requests.live_mut(key);
        let is_done = self.cache.allocate(count, &mut request.pages);
        debug_assert!(is_done, "pages were counted before");
    }

    fn evict(&mut self, count: u32) {
        self.counters.evicted_pages += u64::from(self.cache.evict(count));
        self.tree_version += 1;
    }

    /// Looks the prompt up unless the tree is as it was the last time.
    fn refresh_match(&mut self, key: Key) {
        if !self.config.uses_tree() {
            return;
        }
        let request = self.requests.live_mut(key);
        let matched = &request.waiting.matched;
        if matched
            .as_ref()
            .is_some_and(|(version, _)| *version == self.tree_version)
        {
            return;
        }
        let prefill_len = request.len();
        let namespace = &request.spec.namespace;
        let tokens = &request.tokens[..request.tokens.len() - 1];
        let mut found = self.cache.match_prefix(namespace, tokens);
        let usable = usable_hit(found.cached_len, prefill_len, &self.config);
        if usable == 0 {
            found.cached_len = 0;
            found.pages.clear();
        } else if usable < found.cached_len {
            found = self
                .cache
                .match_prefix(namespace, &tokens[..usable as usize]);
        }
        request.waiting.matched = Some((self.tree_version, found));
    }

    /// Whether to leave a request waiting because another one computes a prefix of it right now,
    /// which it can then hit (`serving.md` a.5).
    fn hold_back(&mut self, key: Key) -> bool {
        let step_id = self.record.step_id;
        let waiting = &self.requests.live(key).waiting;
        let is_counted = waiting.held_step == step_id;
        let may_wait = is_counted || waiting.holds < MAX_HOLDS;
        if self.fresh.is_empty() || !may_wait || !self.config.uses_tree() {
            return false;
        }
        self.refresh_match(key);
        let request = self.requests.live(key);
        let matched = request.waiting.matched.as_ref();
        let hit = matched.map_or(0, |(_, found)| found.cached_len);
        let config = &self.config;
        let gains = self.fresh.iter().any(|other| {
            let shared = shared_len(request, self.requests.live(*other), config.page_size);
            usable_hit(shared, request.len(), config) > hit
        });
        if !gains {
            return false;
        }
        if !is_counted {
            let waiting = &mut self.requests.live_mut(key).waiting;
            waiting.holds += 1;
            waiting.held_step = step_id;
            self.counters.held_back += 1;
        }
        true
    }

    fn note_admission(&mut self, key: Key, hit: u32) {
        let request = self.requests.live_mut(key);
        request.waiting = crate::request::WaitingInfo::default();
        let is_first = request.reported_hit.is_none();
        request.reported_hit.get_or_insert(hit);
        if is_first {
            self.counters.admitted += 1;
            self.counters.prompt_tokens += u64::from(request.prompt_len);
            self.counters.cached_tokens += u64::from(hit);
            self.counters.queue_time_us += self.now_us.saturating_sub(request.spec.arrival_us);
        }
        let (request_id, sequence) = (request.spec.request_id, request.sequence);
        self.plan.admitted.push(request_id);
        self.plan.totals.cached_tokens += hit;
        self.fresh.push(key);
        self.count_overtaking(sequence);
    }
}

/// Sets the fields that hold for one admission (`replay.md` sections 2 and 4).
fn start_admission(
    request: &mut Request,
    slot: u32,
    hit: u32,
    replay: u32,
    decoder_replay: bool,
    window: u32,
) {
    request.slot = slot;
    request.admission += 1;
    request.hit = hit;
    request.tree_len = hit;
    request.prefill_len = request.len();
    request.planned_len = hit;
    request.applied_len = hit;
    request.sent_columns = 0;
    request.window_floor = hit - replay;
    let tail_start = request.prefill_len.saturating_sub(window);
    request.tail_floor = if decoder_replay && !request.spec.whole_extend {
        request.window_floor.max(tail_start)
    } else {
        request.window_floor
    };
}

/// Tokens in whole pages that `request` can take from `other` once that has computed its prompt.
fn shared_len(request: &Request, other: &Request, page_size: u32) -> u32 {
    if request.spec.namespace != other.spec.namespace {
        return 0;
    }
    let ours = request.tokens.chunks_exact(page_size as usize);
    let theirs = other.tokens[..other.prefill_len as usize].chunks_exact(page_size as usize);
    let shared = ours.zip(theirs).take_while(|(a, b)| a == b).count();
    crate::request::len_u32(shared) * page_size
}
