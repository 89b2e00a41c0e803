//! Levels for metrics and logs, with the counters.
use crate::counters::Counters;
use crate::scheduler::Scheduler;

/// Levels now, and the counters.
#[derive(Debug, Clone, PartialEq)]
pub struct Stats {
    /// Requests with a slot.
    pub num_running: usize,
    /// Requests in the queue, or whose prompts are not whole yet.
    pub num_waiting: usize,
    /// Uncached prompt tokens of the requests in the queue, as far as is known.
    pub queued_tokens: u64,
    /// Prefill tokens per second, lately; none before any were measured.
    pub prefill_tokens_per_s: Option<f64>,
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
            num_waiting: self.waiting.len() + self.num_receiving,
            queued_tokens: self.queued_tokens.total(),
            prefill_tokens_per_s: self.prefill_rate.per_us().map(|rate| rate * 1e6),
            steps_in_flight: self.in_flight.len(),
            new_token_ratio: self.ratio.value(),
            counters: self.counters.clone(),
        }
    }
}
