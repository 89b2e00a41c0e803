//! Decode rows: who gets one, and the page it may need.
use crate::error::Result;
use crate::plan::PlanEntry;
use crate::scheduler::Scheduler;
use crate::table::Key;

/// Tells the worker to take the ids before a row from its token ring.
const FROM_RING: i32 = -2;
/// Tells the worker to take the id of a row from its token ring.
const PLACEHOLDER: i32 = -1;

impl Scheduler {
    /// Fills `keys` with the running requests that get a row in this step, pages in hand.
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
        let page_size = self.config.page_size;
        keys.retain(|key| {
            let request = self.requests.live(*key);
            if request.planned_len < crate::request::len_u32(request.pages.len()) * page_size {
                return true;
            }
            let has_page = self.num_available_pages() > 0;
            if has_page {
                self.allocate_pages(*key, 1);
            } else {
                self.counters.stalled_rows += 1;
            }
            has_page
        });
        Ok(())
    }

    /// Puts one row for each of `keys` into the plan.
    pub(crate) fn push_decode_rows(&mut self, keys: &[Key]) {
        for key in keys {
            let request = self.requests.live(*key);
            let position = request.planned_len;
            // The CPU knows the id unless the step that samples it is still in flight.
            let id = request
                .tokens
                .get(position as usize)
                .map_or(PLACEHOLDER, |id| crate::plan::signed(*id));
            let entry = PlanEntry {
                request_id: request.spec.request_id,
                slot: request.slot,
                cached_len: request.hit,
                replay_len: 0,
                tail_len: 1,
                window_floor: request.window_floor,
                tail_floor: request.tail_floor,
                samples: true,
                history_ids: [FROM_RING; 3],
            };
            self.plan.push(&entry, position, std::iter::once(id));
            self.note_rows(*key, position + 1, true, false);
        }
    }

    /// How many of `keys` need a page for their next row.
    pub(crate) fn pages_lacking(&self, keys: &[Key]) -> u32 {
        let page_size = self.config.page_size;
        let lacks_page = |key: &&Key| {
            let request = self.requests.live(**key);
            request.planned_len == crate::request::len_u32(request.pages.len()) * page_size
        };
        crate::request::len_u32(keys.iter().filter(lacks_page).count())
    }

    pub(crate) fn num_available_pages(&self) -> u32 {
        self.cache.num_free() + self.cache.num_evictable()
    }
}
