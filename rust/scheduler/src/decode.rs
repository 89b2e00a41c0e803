//! Decode and verify rows: who gets them, and the pages they may need.
use crate::error::Result;
use crate::plan::{PlanEntry, MASKED, SAMPLED};
use crate::request::{len_u32, Request};
use crate::scheduler::Scheduler;
use crate::step::Rows;
use crate::table::Key;

/// Tells the worker to take the ids before a row from its token ring.
const FROM_RING: i32 = -2;
/// Tells the worker to take the id of a row from its token ring, or from the draft.
const PLACEHOLDER: i32 = -1;

/// The plan's `samples` of a request that samples.
pub(crate) fn sampling_of(request: &Request) -> u8 {
    if request.spec.needs_mask {
        SAMPLED | MASKED
    } else {
        SAMPLED
    }
}

impl Scheduler {
    /// Fills `keys` with the running requests that get rows in this step, pages in hand.
    ///
    /// Left out are those whose planned steps bring their last token, and, while pages are on
    /// their way back, those that lack one. Retracts when that is not enough.
    pub(crate) fn prepare_decode(&mut self, keys: &mut Vec<Key>) -> Result<()> {
        keys.clear();
        let requests = &self.requests;
        let goes_on = |key: &&Key| !requests.live(**key).ends_by_length();
        keys.extend(self.running.iter().filter(goes_on));
        if self.pages_lacking(keys) > self.num_available_pages() {
            self.make_room(keys)?;
        }
        keys.retain(|key| {
            let lacking = self.pages_lacked_by(self.requests.live(*key));
            if lacking == 0 {
                return true;
            }
            let has_pages = lacking <= self.num_available_pages();
            if has_pages {
                self.allocate_pages(*key, lacking);
            } else {
                self.counters.stalled_rows += 1;
            }
            has_pages
        });
        Ok(())
    }

    /// Puts the rows of each of `keys` into the plan: one, or the anchor with its drafts.
    pub(crate) fn push_decode_rows(&mut self, keys: &[Key]) {
        for key in keys {
            let request = self.requests.live(*key);
            let position = request.planned_len;
            let draft_len = self.draft_len_of(request);
            // The CPU knows the id unless the step that samples it is still in flight; with drafts
            // in flight it does not even know the position.
            let known = (request.pending_steps == 0)
                .then(|| request.tokens.get(position as usize))
                .flatten();
            let id = known.map_or(PLACEHOLDER, |id| crate::plan::signed(*id));
            let entry = PlanEntry {
                request_id: request.spec.request_id,
                slot: request.slot,
                cached_len: request.hit,
                replay_len: 0,
                tail_len: draft_len + 1,
                draft_len,
                window_floor: request.window_floor,
                tail_floor: request.tail_floor,
                samples: sampling_of(request),
                history_ids: [FROM_RING; 3],
            };
            let drafts = std::iter::repeat_n(PLACEHOLDER, draft_len as usize);
            self.plan
                .push(&entry, position, std::iter::once(id).chain(drafts));
            let rows = Rows {
                end: position + draft_len + 1,
                draft_len,
                samples: true,
                is_prefill: false,
            };
            self.note_rows(*key, rows);
        }
    }

    /// Drafts that a request's next row gets: as many as it wants, but none past its output limit,
    /// should nothing be accepted before. None in PREFILL steps.
    fn draft_len_of(&self, request: &Request) -> u32 {
        if self.has_drafts {
            let wanted = request.spec.draft_len.unwrap_or(self.config.draft_len);
            let useful = request.remaining_at_most().saturating_sub(1);
            wanted.min(useful)
        } else {
            0
        }
    }

    /// Pages that `keys` need for their next rows.
    pub(crate) fn pages_lacking(&self, keys: &[Key]) -> u32 {
        let lacked = |key: &Key| self.pages_lacked_by(self.requests.live(*key));
        keys.iter().map(lacked).sum()
    }

    /// Pages that a request needs for its next rows: they cover the committed length and whatever
    /// the steps in flight and the next one may accept.
    fn pages_lacked_by(&self, request: &Request) -> u32 {
        let end = request.planned_len + self.draft_len_of(request) + 1;
        let pages = end.div_ceil(self.config.page_size);
        pages.saturating_sub(len_u32(request.pages.len()))
    }

    /// Pages that can be had now, if need be by eviction, and that nobody was promised.
    pub(crate) fn num_available_pages(&self) -> u32 {
        let there = self.cache.num_free() + self.cache.num_evictable();
        // What was promised may be in quarantine still (see `check_promises`).
        there.saturating_sub(self.promised_pages())
    }
}
