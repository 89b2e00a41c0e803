//! Admission: match, lock, allocate, or a reason why not (`serving.md` a.7).
use crate::budget::Budget;
use crate::error::Result;
use crate::pool::{Need, Pool, POOLS};
use crate::prefill::{chunk_end, Progress};
use crate::request::{len_u32, Request, WaitingInfo};
use crate::scheduler::Scheduler;
use crate::state::Lifecycle;
use crate::table::Key;

/// Requests that do not fit and may be passed over in one step, under cache-aware policies.
const MAX_SKIPS: usize = 8;

/// What became of an attempt to admit a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    Admitted,
    /// The step has too few rows left.
    StepFull,
    /// A pool has too little left for this.
    NoUnits(Need),
}

/// Pages set aside for the requests that run, counted once per step.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    pages: Option<u32>,
}

impl Scheduler {
    /// Admits waiting requests in policy order while the step and the pools have room.
    ///
    /// With `shorter_than`, only those with fewer uncached tokens.
    pub(crate) fn admit_waiting(
        &mut self,
        budget: &mut Budget,
        shorter_than: Option<u32>,
    ) -> Result<()> {
        let may_admit = !self.free_slots.is_empty() || self.preempts();
        if self.waiting.is_empty() || !budget.has_room() || !may_admit {
            return Ok(());
        }
        let mut line = self.line_up();
        let mut reserved = Reserved::default();
        let mut admitted = std::mem::take(&mut self.admitted_places);
        admitted.clear();
        let mut skipped = Vec::new();
        while budget.has_room() {
            let Some(key) = self.next_in_line(&mut line) else {
                break;
            };
            let request = self.requests.live(key);
            let (place, tenant) = (request.waiting.place, request.spec.tenant);
            let is_aged = self.is_aged(request);
            if shorter_than.is_some_and(|limit| request.uncached_len() >= limit) {
                break;
            }
            if !is_aged && self.hold_back(key) {
                continue;
            }
            let mut attempt = self.try_admit(key, budget, &mut reserved)?;
            let mut has_preempted = false;
            if let Attempt::NoUnits(need) = attempt {
                has_preempted = self.preempt_for(key, need, &mut reserved)?;
                if has_preempted {
                    attempt = self.try_admit(key, budget, &mut reserved)?;
                }
            }
            match attempt {
                Attempt::Admitted => {
                    admitted.push((place.class, place.rank, tenant));
                    self.count_passing(&skipped, place.class, tenant);
                }
                Attempt::StepFull => break,
                // What was taken from others is not for those behind.
                Attempt::NoUnits(_) if has_preempted => break,
                Attempt::NoUnits(_) => {
                    skipped.push(key);
                    let may_skip = self.config.policy.is_cache_aware() && !is_aged;
                    if !may_skip || skipped.len() > MAX_SKIPS || self.free_slots.is_empty() {
                        break;
                    }
                }
            }
        }
        self.close_line(&line);
        self.count_overtaking(&mut admitted);
        self.admitted_places = admitted;
        Ok(())
    }

    fn try_admit(
        &mut self,
        key: Key,
        budget: &mut Budget,
        reserved: &mut Reserved,
    ) -> Result<Attempt> {
        self.ensure_match(key);
        let request = self.requests.live(key);
        let (prefill_len, hit) = (request.len(), request.waiting.hit);
        let replay = self.config.window.min(hit);
        let progress = Progress {
            prefill_len,
            hit,
            computed: hit,
            replay,
        };
        let page_size = self.config.page_size;
        let Some(end) = chunk_end(
            progress,
            page_size,
            self.config.window,
            &budget.for_prompt(replay),
        ) else {
            return Ok(Attempt::StepFull);
        };
        let is_open = end < prefill_len;
        if (is_open && self.carried.is_some()) || !budget.allows(end - hit, hit / page_size) {
            return Ok(Attempt::StepFull);
        }
        let expected = self.ratio.expected(request);
        let need = Need {
            computed: prefill_len + expected.saturating_sub(1) + self.config.overshoot(),
            shared: hit,
        };
        let found = self.exact_match(key, hit);
        let receipt = match &found {
            Some(found) => Some(self.cache.lock(found.node)?),
            None => None,
        };
        if !self.fits_now(need, reserved) {
            if let Some(receipt) = receipt {
                self.cache.unlock(receipt);
            }
            return Ok(Attempt::NoUnits(need));
        }
        let own_pages = prefill_len.div_ceil(page_size) - hit / page_size;
        if let Some(pages) = reserved.pages.as_mut() {
            *pages += Pool::Full.need(need, page_size) - own_pages;
        }

        if let Some(found) = &found {
            self.cache.count_hit(found.node)?;
        }
        self.leave_queue(key);
        self.charge_admission(key);
        let slot = self.free_slots.pop().expect("fits_now saw a free slot");
        let request = self.requests.live_mut(key);
        request.pages = found.map_or_else(Vec::new, |found| found.pages);
        request.receipt = receipt;
        request.owed_pages = own_pages;
        start_admission(request, slot, hit, replay, &self.config);
        self.note_admission(key, hit);
        let request_id = self.requests.live(key).spec.request_id;
        self.digest.hold(slot, request_id);
        self.move_on(key, Lifecycle::start_prefill);
        budget.take_request(hit / page_size);
        self.push_chunk(key, end, replay, budget);
        if is_open {
            self.carried = Some(key);
            self.carried_step = self.record.step_id;
        } else {
            self.move_on(key, Lifecycle::start_running);
            self.running.push(key);
        }
        Ok(Attempt::Admitted)
    }

    /// The match that ends exactly at `hit`, taken from what the request remembers if it can be.
    pub(crate) fn exact_match(&mut self, key: Key, hit: u32) -> Option<dsserve_radix_cache::Match> {
        if hit == 0 {
            return None;
        }
        let request = self.requests.live(key);
        let known = request.waiting.matched.as_ref();
        if let Some(known) = known.filter(|known| known.cached_len == hit) {
            return Some(known.clone());
        }
        let tokens = &request.tokens[..hit as usize];
        Some(self.cache.look_up(&request.spec.namespace, tokens, None))
    }

    /// Whether each pool has what `need` asks for on top of what running requests are expected to
    /// take.
    fn fits_now(&self, need: Need, reserved: &mut Reserved) -> bool {
        POOLS.iter().all(|pool| {
            let set_aside = self.set_aside(*pool, reserved);
            let units = pool.need(need, self.config.page_size);
            self.pool_use(*pool).available() >= units + set_aside
        })
    }

    /// Units of a pool that the requests with a slot are expected to take beyond those they have.
    pub(crate) fn set_aside(&self, pool: Pool, reserved: &mut Reserved) -> u32 {
        match pool {
            Pool::Full => *reserved.pages.get_or_insert_with(|| self.expected_pages()),
            Pool::Window | Pool::ReqSlots => 0,
        }
    }

    fn expected_pages(&self) -> u32 {
        let page_size = self.config.page_size;
        let holding = self.running.iter().chain(&self.carried);
        holding
            .map(|key| {
                let request = self.requests.live(*key);
                let coming = request.pending_tokens + self.ratio.expected(request);
                let computed = request.len() + coming.saturating_sub(1);
                let computed = computed.min(request.most_computed()) + self.config.overshoot();
                computed
                    .div_ceil(page_size)
                    .saturating_sub(len_u32(request.pages.len()) + request.owed_pages)
            })
            .sum()
    }

    /// Gives a request the pages of its prompt up to token `end`, of those that are set aside for it.
    pub(crate) fn hand_out_pages(&mut self, key: Key, end: u32) {
        let count = self.pages_due(self.requests.live(key), end);
        self.requests.live_mut(key).owed_pages -= count;
        self.allocate_pages(key, count);
    }

    /// Pages that a request lacks for its prompt up to token `end`.
    pub(crate) fn pages_due(&self, request: &Request, end: u32) -> u32 {
        let columns = end.div_ceil(self.config.page_size);
        columns.saturating_sub(len_u32(request.pages.len()))
    }

    /// Pages set aside and not handed out yet: those of the one prompt that is partly planned.
    pub(crate) fn promised_pages(&self) -> u32 {
        let carried = self.carried.map(|key| self.requests.live(key));
        carried.map_or(0, |request| request.owed_pages)
    }

    /// Appends `count` pages to a request. Admission and decode made sure that they exist.
    pub(crate) fn allocate_pages(&mut self, key: Key, count: u32) {
        let shortage = count.saturating_sub(self.cache.num_free());
        if shortage > 0 {
            self.counters.evicted_pages += u64::from(self.cache.evict(shortage));
        }
        let request = self.requests.live_mut(key);
        let is_done = self.cache.allocate(count, &mut request.pages);
        debug_assert!(is_done, "pages were counted before");
    }

    fn note_admission(&mut self, key: Key, hit: u32) {
        let request = self.requests.live_mut(key);
        request.waiting = WaitingInfo::default();
        let is_first = request.reported_hit.is_none();
        request.reported_hit.get_or_insert(hit);
        if is_first {
            self.counters.admitted += 1;
            self.counters.prompt_tokens += u64::from(request.prompt_len);
            self.counters.cached_tokens += u64::from(hit);
            self.counters.queue_time_us += self.now_us.saturating_sub(request.spec.arrival_us);
        }
        self.plan.admitted.push(request.spec.request_id);
        self.plan.totals.cached_tokens += hit;
        self.fresh.push(key);
        if is_first {
            self.start_running_timer(key);
        }
    }
}

/// Sets the fields that hold for one admission (`replay.md` sections 2 and 4).
fn start_admission(
    request: &mut Request,
    slot: u32,
    hit: u32,
    replay: u32,
    config: &crate::config::SchedulerConfig,
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
    let tail_start = request.prefill_len.saturating_sub(config.window);
    request.tail_floor = if config.decoder_replay && !request.spec.whole_extend {
        request.window_floor.max(tail_start)
    } else {
        request.window_floor
    };
}
