//! What the scheduler counts for metrics and logs.

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
    pub finished: [u64; 10],
    /// Retractions.
    pub retracted: u64,
    /// Those of them that made room for a more urgent request.
    pub preempted: u64,
    /// Prompts of waiting requests looked up in the tree.
    pub rematches: u64,
    /// Times a request waited a step for another one's prefix.
    pub held_back: u64,
    /// Decode rows and chunks left out of a step for want of a page.
    pub stalled_rows: u64,
    /// PREFILL steps.
    pub prefill_steps: u64,
    /// DECODE steps.
    pub decode_steps: u64,
    /// VERIFY steps.
    pub verify_steps: u64,
    /// Draft tokens in VERIFY steps.
    pub draft_tokens: u64,
    /// Those of them that the model accepted.
    pub accepted_tokens: u64,
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
    /// Pages that `flush` took from the tree.
    pub flushed_pages: u64,
    /// Time from arrival to first admission, summed.
    pub queue_time_us: u64,
    /// Requests aborted for an illegal state move.
    pub illegal_moves: u64,
}
