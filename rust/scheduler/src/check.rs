//! `check_invariants`: recounts what the scheduler believes (`serving.md` a.15, S1 and S2).
use std::collections::{BTreeMap, HashSet};

use crate::digest::TableDigest;
use crate::error::{Result, SchedulerError};
use crate::scheduler::Scheduler;
use crate::state::{State, STATES};

fn broken(name: &'static str, detail: String) -> Result<()> {
    Err(SchedulerError::Invariant { name, detail })
}

impl Scheduler {
    /// Checks the pool equations, that no page or slot has two owners, and the lists of requests.
    ///
    /// Linear in pages and tokens held; meant for idle moments and tests.
    ///
    /// # Errors
    /// [`SchedulerError::Invariant`] or [`SchedulerError::Cache`], saying what does not hold.
    pub fn check_invariants(&self) -> Result<()> {
        self.cache.check_invariants()?;
        self.check_pools()?;
        self.check_owners()?;
        self.check_lists()?;
        self.check_matches()?;
        self.check_digest()
    }

    fn check_pools(&self) -> Result<()> {
        for pool in self.pool_table() {
            if pool.total() != pool.capacity {
                return broken(
                    "S1",
                    format!("pool {} does not add up: {pool:?}", pool.name),
                );
            }
        }
        self.check_promises()?;
        let page_size = self.config.page_size;
        let private: usize = self
            .requests
            .iter()
            .map(|request| request.private_pages(page_size).len())
            .sum();
        let held = self.cache.num_held() as usize;
        let quarantined = self.quarantine.num_pages() as usize;
        if private + quarantined != held {
            return broken(
                "S1",
                format!("{private} private and {quarantined} quarantined pages, {held} held"),
            );
        }
        Ok(())
    }

    /// What was promised is there, and to nobody but the prompt that is partly planned.
    ///
    /// A request that goes over to pages of the tree locks those, which were there for anybody, and
    /// leaves as many of its own in quarantine: they count until the steps in flight are applied.
    fn check_promises(&self) -> Result<()> {
        let promised = self.promised_pages();
        let there =
            self.cache.num_free() + self.cache.num_evictable() + self.quarantine.num_pages();
        let owed: u32 = self.requests.iter().map(|request| request.owed_pages).sum();
        if promised > there || owed != promised {
            let detail = format!("{promised} pages promised, {owed} owed, {there} there");
            return broken("S1", detail);
        }
        Ok(())
    }

    fn check_owners(&self) -> Result<()> {
        let page_size = self.config.page_size;
        let mut pages = HashSet::new();
        let private = self
            .requests
            .iter()
            .flat_map(|request| request.private_pages(page_size));
        for page in private.copied().chain(self.quarantine.pages()) {
            if !pages.insert(page) {
                return broken("S2", format!("page {page} has two owners"));
            }
            if !self.cache.is_held(page) {
                return broken("S2", format!("page {page} is free or in the tree as well"));
            }
        }
        let mut slots: HashSet<u32> = self.free_slots.iter().copied().collect();
        let mut count = self.free_slots.len();
        for request in self.requests.iter().filter(|request| request.slot != 0) {
            count += 1;
            slots.insert(request.slot);
        }
        if slots.len() != count || slots.contains(&0) {
            return broken("S2", "a slot has two owners".to_owned());
        }
        Ok(())
    }

    fn check_lists(&self) -> Result<()> {
        let mut counts = [0_usize; STATES.len()];
        for request in self.requests.iter() {
            let state = request.state();
            counts[state as usize] += 1;
            let holds = !request.pages.is_empty() || request.receipt.is_some();
            let may_own = state.may_own();
            if (request.slot != 0) != may_own || (holds && !may_own) {
                return broken(
                    "states",
                    format!(
                        "request {} is {state:?} with slot {} and {} pages",
                        request.spec.request_id,
                        request.slot,
                        request.pages.len()
                    ),
                );
            }
        }
        let listed = [
            (State::Received, self.num_receiving),
            (State::Waiting, self.waiting.len()),
            (State::Prefilling, usize::from(self.carried.is_some())),
            (State::Running, self.running.len()),
            (State::Retracted, counts[State::Retracted as usize]),
        ];
        let num_listed: usize = listed.iter().map(|(_, len)| len).sum();
        let agrees = listed
            .iter()
            .all(|(state, len)| counts[*state as usize] == *len);
        if !agrees || num_listed != self.requests.len() {
            return broken("states", format!("{counts:?} by state, {listed:?} by list"));
        }
        let mut queued = BTreeMap::new();
        for key in self.waiting.iter() {
            let waiting = &self.requests.live(key).waiting;
            *queued.entry(waiting.place.class).or_insert(0) += u64::from(waiting.counted);
        }
        let known = self.queued_tokens.by_class();
        if queued != *known || queued.values().sum::<u64>() != self.queued_tokens.total() {
            return broken(
                "queue",
                format!("{queued:?} tokens queued, {known:?} counted"),
            );
        }
        let counted = self.fairness.num_waiting();
        if self.config.fair && counted != self.waiting.len() {
            let detail = format!("{counted} requests counted by tenant");
            return broken("queue", detail);
        }
        let (num_stale, most) = (self.num_stale(), self.most_stale());
        if num_stale > most {
            let detail = format!("{num_stale} requests to look up again, at most {most} can be");
            return broken("queue", detail);
        }
        Ok(())
    }

    /// A waiting request that nobody told to look again would find what it remembers.
    fn check_matches(&self) -> Result<()> {
        for key in self.waiting.iter() {
            let request = self.requests.live(key);
            let waiting = &request.waiting;
            let Some(matched) = waiting.matched.as_ref().filter(|_| !waiting.is_stale) else {
                continue;
            };
            if self.cache.prefix_len(matched.node).is_err() {
                continue;
            }
            let matchable = &request.tokens[..request.tokens.len() - 1];
            let namespace = &request.spec.namespace;
            let found = self.cache.match_dry_run(namespace, matchable);
            if found != matched.cached_len {
                let id = request.spec.request_id;
                let known = matched.cached_len;
                let detail = format!("request {id} believes in a hit of {known}, it is {found}");
                return broken("matches", detail);
            }
        }
        Ok(())
    }

    /// S6: what followers have of each slot is what its request holds.
    fn check_digest(&self) -> Result<()> {
        for (key, request) in self.requests.entries().filter(|(_, r)| r.slot != 0) {
            let mut table = TableDigest::new(self.config.max_running_requests + 1);
            table.hold(request.slot, request.spec.request_id);
            for column in 0..request.sent_columns {
                let unsent = self.rewritten.iter().find(|entry| {
                    entry.key == key
                        && entry.admission == request.admission
                        && entry.column == column
                });
                let page = unsent.map_or(request.pages[column as usize], |entry| entry.own);
                table.add(request.slot, column, page);
            }
            if table.of_slot(request.slot) != self.digest.of_slot(request.slot) {
                let detail = format!(
                    "the digest of slot {} is not that of its pages",
                    request.slot
                );
                return broken("S6", detail);
            }
        }
        Ok(())
    }
}
