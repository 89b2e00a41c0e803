//! `check_invariants`: recounts what the scheduler believes (`serving.md` a.15, S1 and S2).
use std::collections::HashSet;

use crate::error::{Result, SchedulerError};
use crate::scheduler::Scheduler;
use crate::state::State;

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
        self.check_lists()
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
        let mut counts = [0_usize; 5];
        for request in self.requests.iter() {
            counts[request.state as usize] += 1;
            let holds = !request.pages.is_empty() || request.receipt.is_some();
            let may_hold = matches!(request.state, State::Prefilling | State::Running);
            if (request.slot != 0) != may_hold || (holds && !may_hold) {
                return broken(
                    "states",
                    format!(
                        "request {} is {:?} with slot {} and {} pages",
                        request.spec.request_id,
                        request.state,
                        request.slot,
                        request.pages.len()
                    ),
                );
            }
        }
        let lists = [
            self.waiting.len(),
            usize::from(self.carried.is_some()),
            self.running.len(),
            counts[State::Retracted as usize],
            0,
        ];
        if counts != lists {
            return broken("states", format!("{counts:?} by state, {lists:?} by list"));
        }
        Ok(())
    }
}
