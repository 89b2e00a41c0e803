//! Who gives pages back when decode rows lack them, and how a request lets go of what it holds.
use std::cmp::Reverse;

use dsserve_radix_cache::InsertOptions;

use crate::config::RetractionPolicy;
use crate::error::Result;
use crate::event::FinishCode;
use crate::overlap::{Leftover, Rewritten};
use crate::request::{len_u32, Request};
use crate::scheduler::Scheduler;
use crate::state::{Lifecycle, State};
use crate::table::Key;

impl Scheduler {
    /// Retracts requests until the rest of `keys` get the pages they lack, or until pages are on
    /// their way back: then those who lack one sit this step out instead.
    pub(crate) fn make_room(&mut self, keys: &mut Vec<Key>) -> Result<()> {
        while self.pages_lacking(keys) > self.num_available_pages() {
            // Requests that are not in `keys` bring back their pages with the steps in flight.
            let pages_return = !self.quarantine.is_empty() || keys.len() < self.running.len();
            if pages_return || (keys.len() == 1 && self.carried.is_some()) {
                break;
            }
            if let [last] = keys[..] {
                keys.clear();
                self.end_request(last, FinishCode::ErrorPool, None)?;
                self.prune_running();
                break;
            }
            let Some(victim) = self.pick_victim(keys) else {
                break;
            };
            keys.retain(|key| *key != victim);
            self.retract(victim)?;
            self.has_retracted = true;
        }
        Ok(())
    }

    /// The first in the order of [`RetractionPolicy`].
    fn pick_victim(&self, keys: &[Key]) -> Option<Key> {
        keys.iter().copied().min_by_key(|key| {
            let request = self.requests.live(*key);
            let first = match self.config.retraction_policy {
                RetractionPolicy::Length => 0,
                // Without priority scheduling the field still says who matters.
                RetractionPolicy::Priority => self.urgency(request),
                RetractionPolicy::Cost => self.cost_per_page(request),
            };
            (
                first,
                request.output_len() + request.pending_tokens,
                Reverse(request.prompt_len),
                Reverse(request.sequence),
            )
        })
    }

    /// Larger is more urgent; no priority is the least.
    fn urgency(&self, request: &Request) -> i64 {
        let sign = if self.config.priority.low_values_first {
            -1
        } else {
            1
        };
        let priority = request.spec.priority.map(i64::from);
        priority.map_or(i64::MIN, |priority| sign * priority)
    }

    /// The same in the range of the cache's priorities.
    fn importance(&self, request: &Request) -> i32 {
        let urgency = self.urgency(request);
        i32::try_from(urgency).unwrap_or(if urgency < 0 { i32::MIN } else { i32::MAX })
    }

    /// Tokens to compute again for each page that a retraction brings, in 1/1024: whole pages stay
    /// in the tree, the window and the rest of the last page do not.
    fn cost_per_page(&self, request: &Request) -> i64 {
        let page_size = self.config.page_size;
        let lost = request.applied_len % page_size + self.config.replay_window();
        let pages = self.returned_pages(request).max(1);
        i64::from(lost) * 1024 / i64::from(pages)
    }

    /// Pages that letting go of a request brings back, sooner or later: its own, and those of the
    /// tree that only it keeps.
    pub(crate) fn returned_pages(&self, request: &Request) -> u32 {
        let own = request.private_pages(self.config.page_size).len();
        let receipt = request.receipt.as_ref();
        len_u32(own) + receipt.map_or(0, |receipt| self.cache.num_kept_by(receipt))
    }

    pub(crate) fn retract(&mut self, key: Key) -> Result<()> {
        let applied_len = self.requests.live(key).applied_len;
        self.let_go(key, Some(applied_len))?;
        self.move_on(key, Lifecycle::retract);
        self.running.retain(|other| *other != key);
        let requests = &self.requests;
        let goes_on = self.running.iter().chain(&self.carried);
        self.ratio.reset(goes_on.map(|key| requests.live(*key)));
        self.counters.retracted += 1;
        self.requeue_if_settled(key);
        Ok(())
    }

    /// Puts a retracted request back into the queue once no step in flight holds it.
    pub(crate) fn requeue_if_settled(&mut self, key: Key) {
        let request = self.requests.live(key);
        let is_settled = request.last_step <= self.in_flight.last_applied();
        if request.state() == State::Retracted && is_settled {
            let class = self.class_of(&request.spec);
            self.move_on(key, Lifecycle::queue);
            let place = self.waiting.push_retracted(class, key);
            self.requests.live_mut(key).waiting.place = place;
            self.note_waiting(key);
        }
    }

    /// Takes slot, pages and locks from a request; they wait in quarantine for the steps in flight.
    ///
    /// With `valid_len`, whole pages within that many tokens go to the tree first.
    pub(crate) fn let_go(&mut self, key: Key, valid_len: Option<u32>) -> Result<()> {
        if self.requests.live(key).slot == 0 {
            return Ok(());
        }
        if let Some(valid_len) = valid_len {
            self.insert_pages(key, valid_len)?;
        }
        let returning = self.returned_pages(self.requests.live(key));
        let page_size = self.config.page_size;
        let request = self.requests.live_mut(key);
        let pages = request.private_pages(page_size).to_vec();
        request.pages.clear();
        request.tree_len = 0;
        request.owed_pages = 0;
        request.planned_len = 0;
        request.applied_len = 0;
        request.hit = 0;
        self.quarantine.push(Leftover {
            until_step: request.last_step,
            pages,
            receipt: request.receipt.take(),
            slot: std::mem::take(&mut request.slot),
            returning,
        });
        self.fresh.retain(|other| *other != key);
        self.release_quarantine();
        Ok(())
    }

    /// Gives the whole pages within `valid_len` tokens to the tree, keeping them locked.
    ///
    /// Where the tree had a page already the request goes over to it; its own stays in quarantine
    /// until no step reads it.
    pub(crate) fn insert_pages(&mut self, key: Key, valid_len: u32) -> Result<()> {
        let page_size = self.config.page_size;
        let importance = self.importance(self.requests.live(key));
        let request = self.requests.live_mut(key);
        let end = valid_len / page_size * page_size;
        if !self.config.uses_tree() || end <= request.tree_len {
            return Ok(());
        }
        let namespace = &request.spec.namespace;
        let tokens = &request.tokens[..end as usize];
        let pages = &request.pages[..(end / page_size) as usize];
        let mut options = InsertOptions::default().with_priority(importance);
        if let Some(receipt) = &request.receipt {
            options = options.with_from(receipt.node());
        }
        let inserted = self.cache.insert_with(namespace, tokens, pages, options)?;
        let receipt = self.cache.lock(inserted.node)?;
        if let Some(old) = request.receipt.replace(receipt) {
            self.cache.unlock(old);
        }
        request.tree_len = end;
        for replaced in &inserted.replaced {
            request.pages[replaced.page_index as usize] = replaced.tree;
            if replaced.page_index < request.sent_columns {
                self.rewritten.push(Rewritten {
                    key,
                    admission: request.admission,
                    column: replaced.page_index,
                    own: replaced.own,
                });
            }
        }
        if !inserted.replaced.is_empty() {
            let pages = inserted.replaced.iter().map(|replaced| replaced.own);
            self.quarantine.push(Leftover {
                until_step: request.last_step,
                returning: len_u32(inserted.replaced.len()),
                pages: pages.collect(),
                receipt: None,
                slot: 0,
            });
        }
        if inserted.reused_len < end {
            self.note_growth(key, inserted.reused_len);
        }
        Ok(())
    }

    /// Makes what no step in flight holds allocatable again.
    pub(crate) fn release_quarantine(&mut self) {
        let before = self.free_slots.len();
        let last_applied = self.in_flight.last_applied();
        self.quarantine
            .release(last_applied, &mut self.cache, &mut self.free_slots);
        for slot in &self.free_slots[before..] {
            self.digest.clear(*slot);
        }
        self.released_slots.extend(&self.free_slots[before..]);
    }
}
