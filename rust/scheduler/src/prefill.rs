//! Which rows of a prompt a step computes: chunk ends, encoder-replay and decoder-replay rows.
use crate::budget::Budget;
use crate::config::SchedulerConfig;
use crate::decode::sampling_of;
use crate::plan::PlanEntry;
use crate::request::Request;
use crate::scheduler::Scheduler;
use crate::step::Rows;
use crate::table::Key;

/// Progress of a prompt, from which its next chunk follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Tokens to prefill in this admission.
    pub prefill_len: u32,
    /// Tokens of it that came from the cache.
    pub hit: u32,
    /// Tokens of it planned so far, the hit included.
    pub computed: u32,
    /// Replay rows its next chunk starts with.
    pub replay: u32,
}

/// Where the next chunk ends, or `None` if it should wait for a step with more room.
///
/// Ends are multiples of the page size except the last. The last chunk has at least a window of
/// rows (replay rows included): its tail fills the windows of the decoder half, in which the open
/// chunks leave nothing. A chunk with `end == computed` holds replay rows only.
pub(crate) fn chunk_end(
    progress: Progress,
    page_size: u32,
    window: u32,
    budget: &Budget,
) -> Option<u32> {
    let Progress {
        prefill_len,
        hit,
        computed,
        replay,
    } = progress;
    let room = budget.rows().checked_sub(replay)?;
    if prefill_len - computed <= room {
        return Some(prefill_len);
    }
    if prefill_len - hit < window {
        return None;
    }
    let end = (computed + room).min(prefill_len - window) / page_size * page_size;
    if end > computed {
        return Some(end);
    }
    // Less than a window and a page is left, and it fits a step without the replay rows.
    (replay > 0 && budget.is_untouched()).then_some(computed)
}

/// The hit that a request should take, given what the tree holds: a whole number of pages.
pub(crate) fn usable_hit(cached_len: u32, request: &Request, config: &SchedulerConfig) -> u32 {
    let limit = request.spec.max_cached_len.unwrap_or(u32::MAX);
    usable_len(cached_len.min(limit), request.len(), config)
}

/// The part of a hit that a prompt of `prefill_len` tokens should take.
///
/// A hit of a window or less is refused: all of it would be replayed. A hit so long that the rest
/// is less than a window, but too long for one step together with the replay rows, is shortened
/// until the rest fills a window.
pub(crate) fn usable_len(cached_len: u32, prefill_len: u32, config: &SchedulerConfig) -> u32 {
    let (window, page_size) = (config.window, config.page_size);
    let mut hit = cached_len.min(prefill_len - 1) / page_size * page_size;
    let fits_a_step = |hit: u32| {
        let new = prefill_len - hit;
        window + new <= config.least_prefill_rows() && new <= config.chunk_tokens()
    };
    if prefill_len - hit < window && !fits_a_step(hit) {
        hit = prefill_len.saturating_sub(window) / page_size * page_size;
    }
    if hit <= window {
        0
    } else {
        hit
    }
}

impl Scheduler {
    /// Where the next chunk of the carried request ends; `None` if it does not fit this step.
    pub(crate) fn carried_chunk(&self, request: &Request, budget: &Budget) -> Option<u32> {
        chunk_end(
            Progress {
                prefill_len: request.prefill_len,
                hit: request.hit,
                computed: request.planned_len,
                replay: 0,
            },
            self.config.page_size,
            self.config.window,
            &budget.for_carried(),
        )
    }

    /// Puts the rows of a prompt up to `end` into the plan, `replay` rows before them.
    pub(crate) fn push_chunk(&mut self, key: Key, end: u32, replay: u32, budget: &mut Budget) {
        let window = self.config.window;
        self.hand_out_pages(key, end);
        let request = self.requests.live_mut(key);
        let start = request.planned_len - replay;
        let rows = end - start;
        let is_last = end == request.prefill_len;
        let cuts_tail = self.config.decoder_replay && !request.spec.whole_extend;
        let tail_len = match (cuts_tail, is_last) {
            (true, true) => rows.min(window),
            (true, false) => 0,
            (false, _) => rows,
        };
        let history = |back: u32| {
            start.checked_sub(back).map_or(-1, |position| {
                crate::plan::signed(request.tokens[position as usize])
            })
        };
        let entry = PlanEntry {
            request_id: request.spec.request_id,
            slot: request.slot,
            cached_len: request.hit,
            replay_len: replay,
            tail_len,
            draft_len: 0,
            window_floor: request.window_floor,
            tail_floor: request.tail_floor,
            samples: if is_last { sampling_of(request) } else { 0 },
            history_ids: [history(3), history(2), history(1)],
        };
        let new_tokens = end - request.planned_len;
        let ids = request.tokens[start as usize..end as usize].iter();
        self.plan
            .push(&entry, start, ids.map(|id| crate::plan::signed(*id)));
        self.plan.totals.prefill_tokens += new_tokens;
        budget.take_rows(rows, new_tokens);
        self.note_rows(
            key,
            Rows {
                end,
                draft_len: 0,
                samples: is_last,
                is_prefill: true,
            },
        );
    }
}

#[cfg(test)]
#[path = "prefill_tests.rs"]
mod tests;
