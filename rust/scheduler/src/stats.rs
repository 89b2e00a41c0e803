//! Counters and levels for metrics and logs.
use crate::scheduler::Scheduler;

/// Counts since the start; they only grow.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Counters {
    /// Requests accepted by `submit`.
    pub submitted: u64,
    /// Requests refused by `submit`.
    pub rejected: u64,
    /// First admissions.
    pub admitted: u64,
    /// Ended requests by finish code.
    pub finished: [u64; 9],
    /// Retractions.
    pub retracted: u64,
    /// Times a request waited a step for another one's prefix.
    pub held_back: u64,
    /// Decode rows left out of a step for want of a page.
    pub stalled_rows: u64,
    /// PREFILL steps.
    pub prefill_steps: u64,
    /// DECODE steps.
    pub decode_steps: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Those of them that came from the cache.
    pub cached_tokens: u64,
    /// Prompt rows computed, recomputation after retraction included.
    pub prefill_tokens: u64,
    /// Encoder replay rows.
    pub encoder_replay_rows: u64,
    /// Rows that ran the decoder half in PREFILL steps.
    pub decoder_tail_rows: u64,
    /// Output tokens.
    pub generated_tokens: u64,
    /// Pages evicted from the tree.
    pub evicted_pages: u64,
    /// Time from arrival to first admission, summed.
    pub queue_time_us: u64,
    /// Requests aborted for an illegal state move.
    pub illegal_moves: u64,
}

/// Levels now, and the counters.
#[derive(Debug, Clone, PartialEq)]
pub struct Stats {
    /// Requests with a slot.
    pub num_running: usize,
    /// Requests in the queue.
    pub num_waiting: usize,
    /// Steps planned and not applied.
    pub steps_in_flight: usize,
    /// Share of the output limits that admission reserves.
    pub new_token_ratio: f64,
    /// Counts since the start.
    pub counters: Counters,
}

impl Scheduler {
    /// Levels and counters; pools are in [`Scheduler::pool_table`].
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            num_running: self.running.len() + usize::from(self.carried.is_some()),
            num_waiting: self.waiting.len(),
            steps_in_flight: self.in_flight.len(),
            new_token_ratio: self.ratio.value(),
            counters: self.counters.clone(),
        }
    }
}
