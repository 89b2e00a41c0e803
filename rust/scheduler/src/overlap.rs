//! Steps in flight, and what freed requests leave behind until those steps are applied.
use std::collections::VecDeque;

use dsserve_radix_cache::{PageId, RadixCache, Receipt};

use crate::step::Rows;
use crate::table::Key;

/// One request's part of a step in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepRow {
    pub key: Key,
    /// Admission the rows belong to.
    pub admission: u32,
    pub rows: Rows,
}

/// A step that is planned and not applied.
#[derive(Debug, Default)]
pub(crate) struct StepRecord {
    pub step_id: u64,
    pub rows: Vec<StepRow>,
    pub planned_us: u64,
    pub prefill_tokens: u32,
}

impl StepRecord {
    /// Whether the step has prompt rows: they come first.
    pub fn has_prefill(&self) -> bool {
        self.rows.first().is_some_and(|row| row.rows.is_prefill)
    }
}

/// A page-table entry to send again: the tree had the page already.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rewritten {
    pub key: Key,
    pub admission: u32,
    pub column: u32,
    /// What the device has there.
    pub own: PageId,
}

/// The steps in flight, oldest first. Records are reused.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    steps: VecDeque<StepRecord>,
    spare: Vec<StepRecord>,
    last_planned: u64,
    last_applied: u64,
}

impl InFlight {
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    pub fn last_applied(&self) -> u64 {
        self.last_applied
    }

    pub fn next_id(&self) -> u64 {
        self.last_planned + 1
    }

    pub fn oldest(&self) -> Option<&StepRecord> {
        self.steps.front()
    }

    /// Whether any of them has prompt rows.
    pub fn has_prefill(&self) -> bool {
        self.steps.iter().any(StepRecord::has_prefill)
    }

    /// An empty record numbered [`InFlight::next_id`]; `push` it to make it a step.
    pub fn open(&mut self) -> StepRecord {
        let mut record = self.spare.pop().unwrap_or_default();
        record.step_id = self.next_id();
        record.rows.clear();
        record
    }

    pub fn push(&mut self, record: StepRecord) {
        debug_assert_eq!(record.step_id, self.next_id());
        self.last_planned = record.step_id;
        self.steps.push_back(record);
    }

    pub fn pop(&mut self) -> Option<StepRecord> {
        let record = self.steps.pop_front()?;
        self.last_applied = record.step_id;
        Some(record)
    }

    pub fn recycle(&mut self, record: StepRecord) {
        self.spare.push(record);
    }
}

/// What a request held when it let go, readable by steps up to `until_step`.
#[derive(Debug)]
pub(crate) struct Leftover {
    pub until_step: u64,
    pub pages: Vec<PageId>,
    pub receipt: Option<Receipt>,
    /// 0 = none.
    pub slot: u32,
    /// Pages that can be handed out once it is released: `pages`, and those of the tree that only
    /// `receipt` keeps.
    pub returning: u32,
}

/// Leftovers that a step in flight may still read or write (`serving.md` a.10).
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    entries: Vec<Leftover>,
    num_pages: u32,
    num_returning: u32,
}

impl Quarantine {
    pub fn push(&mut self, leftover: Leftover) {
        self.num_pages += crate::request::len_u32(leftover.pages.len());
        self.num_returning += leftover.returning;
        self.entries.push(leftover);
    }

    /// Returns everything that no step after `last_applied` holds; the slots go to `slots`.
    pub fn release(&mut self, last_applied: u64, cache: &mut RadixCache, slots: &mut Vec<u32>) {
        let mut index = 0;
        while index < self.entries.len() {
            if self.entries[index].until_step > last_applied {
                index += 1;
                continue;
            }
            // Order among entries is kept: which page is handed out next must not depend on it.
            let leftover = self.entries.remove(index);
            self.num_pages -= crate::request::len_u32(leftover.pages.len());
            self.num_returning -= leftover.returning;
            cache.free(&leftover.pages);
            if let Some(receipt) = leftover.receipt {
                cache.unlock(receipt);
            }
            if leftover.slot != 0 {
                slots.push(leftover.slot);
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn num_pages(&self) -> u32 {
        self.num_pages
    }

    /// Pages that its release brings, those of the tree that may become evictable included.
    pub fn num_returning(&self) -> u32 {
        self.num_returning
    }

    pub fn num_slots(&self) -> u32 {
        crate::request::len_u32(self.entries.iter().filter(|entry| entry.slot != 0).count())
    }

    pub fn pages(&self) -> impl Iterator<Item = PageId> + '_ {
        self.entries.iter().flat_map(|entry| &entry.pages).copied()
    }

    pub fn drain(&mut self) -> std::vec::Drain<'_, Leftover> {
        self.num_pages = 0;
        self.num_returning = 0;
        self.entries.drain(..)
    }
}
