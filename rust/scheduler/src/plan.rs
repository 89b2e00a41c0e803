//! `StepPlan`: what one step computes, an array per field.
use crate::config::SchedulerConfig;

/// Kind of a step. The numbers are those of the plan's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Phase {
    /// Nothing to compute.
    #[default]
    Idle = 0,
    /// Prompt rows, decode rows may ride along.
    Prefill = 1,
    /// One row per running request.
    Decode = 2,
    /// The anchor and the draft tokens of each running request.
    Verify = 3,
    /// Publishes state that was received; no forward.
    Prebuilt = 4,
}

/// Bit of [`StepPlan::samples`]: ids come back for the request.
pub const SAMPLED: u8 = 1;
/// Bit of [`StepPlan::samples`]: the sampling, not the forward, waits for the request's mask.
pub const MASKED: u8 = 2;

/// One step: B requests, T rows, arrays per field (`DESIGN` of the engine; `replay.md` for floors).
///
/// Addresses of KV: FULL row of position p is on page `page_table[slot][p / page_size]`.
///
/// While a VERIFY step is in flight nobody knows how many of its drafts were accepted. Of the rows of
/// requests in it (`history_ids` -2), `start_position` and `positions` are then the largest possible
/// ones: pages are there up to them, and the device takes the true start from its committed lengths.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct StepPlan {
    /// Number of the step, from 1.
    pub step_id: u64,
    /// Kind of the step.
    pub phase: Phase,
    /// \[B\] identity.
    pub request_id: Vec<u64>,
    /// \[B\] 1..; 0 is the padding slot.
    pub request_slot: Vec<i32>,
    /// \[B+1\] row ranges.
    pub cu_seqlens: Vec<i32>,
    /// \[B\] position of the first row, replay rows included.
    pub start_position: Vec<i32>,
    /// \[B\] hit at admission.
    pub cached_len: Vec<i32>,
    /// \[B\] encoder replay rows at the start of this chunk.
    pub replay_len: Vec<i32>,
    /// \[B\] last rows that run the decoder half.
    pub tail_len: Vec<i32>,
    /// \[B\] draft tokens behind the first row.
    pub draft_len: Vec<i32>,
    /// \[B\] windows of encoder layers see nothing below.
    pub window_floor: Vec<i32>,
    /// \[B\] shared rows below are never written.
    pub write_floor: Vec<i32>,
    /// \[B\] windows of decoder layers see nothing below.
    pub tail_floor: Vec<i32>,
    /// \[B\] [`SAMPLED`] where the last row (with drafts: every row) is sampled, with
    /// [`MASKED`] where that waits for the request's mask.
    pub samples: Vec<u8>,
    /// \[B\] ids at `start_position` -3..-1, -1 before the start; -2 = the device's token ring.
    pub history_ids: Vec<[i32; 3]>,
    /// \[T\] -1 = placeholder, the device takes the id from its token ring.
    pub token_ids: Vec<i32>,
    /// \[T\] positions.
    pub positions: Vec<i32>,
    /// Page-table entries to write before the step: slot, column, page.
    pub page_deltas: Vec<[i32; 3]>,
    /// Slots given back since the last plan; release them before using this plan.
    pub released_slots: Vec<i32>,
    /// Requests that got a slot in this step.
    pub admitted: Vec<u64>,
    /// Attention-DP group that the plan is for.
    pub group_id: u32,
    /// What the page table must hold after the deltas, for followers to compare.
    pub digest: u64,
    /// Sums for logs and metrics.
    pub totals: PlanTotals,
}

/// Sums over the requests of a [`StepPlan`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PlanTotals {
    /// Encoder replay rows.
    pub replay_rows: u32,
    /// Rows that run the decoder half.
    pub tail_rows: u32,
    /// Rows of prompts that no step of this admission computed before.
    pub prefill_tokens: u32,
    /// Hits of the requests admitted in this step.
    pub cached_tokens: u32,
    /// Requests that sample.
    pub sampling_rows: u32,
    /// Draft tokens.
    pub draft_tokens: u32,
    /// Largest position plus one.
    pub max_computed_len: u32,
}

/// Array lengths that every plan of a scheduler fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanCapacity {
    /// Requests in a step (B).
    pub requests: u32,
    /// Rows in a step (T).
    pub rows: u32,
    /// Page-table entries written by a step.
    pub deltas: u32,
    /// Request slots, the padding slot included.
    pub slots: u32,
    /// Columns of the page table.
    pub columns: u32,
}

impl PlanCapacity {
    /// Capacity for a validated configuration.
    ///
    /// A step sends: entries rewritten by at most two applied steps, the pages of its chunks and
    /// decode rows, and hit pages (one longest request; admission stops before more).
    #[must_use]
    pub fn of(config: &SchedulerConfig) -> Self {
        let requests = config.max_running_requests;
        let rows = (config.prefill_rows()).max(requests * (config.draft_len + 1));
        let chunk_pages = rows.div_ceil(config.page_size) + requests;
        Self {
            requests,
            rows,
            deltas: config.columns() + 4 * chunk_pages,
            slots: requests + 1,
            columns: config.columns(),
        }
    }
}

/// One request's part of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlanEntry {
    pub request_id: u64,
    pub slot: u32,
    pub cached_len: u32,
    pub replay_len: u32,
    pub tail_len: u32,
    pub draft_len: u32,
    pub window_floor: u32,
    pub tail_floor: u32,
    pub samples: u8,
    pub history_ids: [i32; 3],
}

impl StepPlan {
    pub(crate) fn clear(&mut self) {
        self.phase = Phase::Idle;
        self.request_id.clear();
        self.request_slot.clear();
        self.cu_seqlens.clear();
        self.cu_seqlens.push(0);
        self.start_position.clear();
        self.cached_len.clear();
        self.replay_len.clear();
        self.tail_len.clear();
        self.draft_len.clear();
        self.window_floor.clear();
        self.write_floor.clear();
        self.tail_floor.clear();
        self.samples.clear();
        self.history_ids.clear();
        self.token_ids.clear();
        self.positions.clear();
        self.page_deltas.clear();
        self.released_slots.clear();
        self.admitted.clear();
        self.digest = 0;
        self.totals = PlanTotals::default();
    }

    pub(crate) fn num_rows(&self) -> u32 {
        crate::request::len_u32(self.positions.len())
    }

    /// Appends a request with rows `start..start + ids.len()`; ids of -1 are placeholders.
    pub(crate) fn push(&mut self, entry: &PlanEntry, start: u32, ids: impl Iterator<Item = i32>) {
        let first = self.token_ids.len();
        self.token_ids.extend(ids);
        let end = start + crate::request::len_u32(self.token_ids.len() - first);
        self.positions.extend(signed(start)..signed(end));
        self.request_id.push(entry.request_id);
        self.request_slot.push(signed(entry.slot));
        self.cu_seqlens.push(signed(self.num_rows()));
        self.start_position.push(signed(start));
        self.cached_len.push(signed(entry.cached_len));
        self.replay_len.push(signed(entry.replay_len));
        self.tail_len.push(signed(entry.tail_len));
        self.draft_len.push(signed(entry.draft_len));
        self.window_floor.push(signed(entry.window_floor));
        self.write_floor.push(signed(entry.cached_len));
        self.tail_floor.push(signed(entry.tail_floor));
        self.samples.push(entry.samples);
        self.history_ids.push(entry.history_ids);
        self.totals.replay_rows += entry.replay_len;
        self.totals.tail_rows += entry.tail_len;
        self.totals.sampling_rows += u32::from(entry.samples != 0);
        self.totals.draft_tokens += entry.draft_len;
        self.totals.max_computed_len = self.totals.max_computed_len.max(end);
    }

    pub(crate) fn push_delta(&mut self, slot: u32, column: u32, page: u32) {
        self.page_deltas
            .push([signed(slot), signed(column), signed(page)]);
    }
}

/// Lengths, slots and pages are validated to be below 2^29; vocabularies too.
pub(crate) fn signed(value: u32) -> i32 {
    i32::try_from(value).expect("lengths, ids and counts are validated to be below 2^29")
}
