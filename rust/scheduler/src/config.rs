//! `SchedulerConfig`: limits and switches, validated once.
use serde::Deserialize;

use crate::error::{Result, SchedulerError};

/// Order of the waiting queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Arrival.
    Fcfs,
    /// Longest matched prefix first.
    Lpm,
}

/// Which request gives its pages back first when decode rows lack some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RetractionPolicy {
    /// The one with the fewest output tokens, then the longest prompt, then the last arrival.
    #[default]
    Length,
    /// The least urgent one first; among equals as `Length`.
    Priority,
}

/// Limits and switches of a [`Scheduler`](crate::Scheduler).
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent switches of the command line"
)]
pub struct SchedulerConfig {
    /// Tokens per page; a power of two and a multiple of `stateful_ratio`.
    pub page_size: u32,
    /// Usable pages of the FULL pool (page 0, the dummy, not counted).
    pub num_pages: u32,
    /// Requests that may hold a slot at once. Slots are `1..=max_running_requests`; 0 is padding.
    pub max_running_requests: u32,
    /// Waiting requests past which `submit` rejects; none = unbounded.
    #[serde(default)]
    pub max_queued_requests: Option<u32>,
    /// Rows of one PREFILL step, replay rows included; -1 = no chunking.
    pub chunked_prefill_size: i64,
    /// New prompt tokens in one step past which no further request joins it.
    #[serde(default = "default_max_prefill_tokens")]
    pub max_prefill_tokens: u32,
    /// Longest prompt plus output.
    pub context_length: u32,
    /// The model's sliding window.
    pub window: u32,
    /// Ids at or above are refused.
    pub vocab_size: u32,
    /// Rebuild encoder windows after a hit. Off: no prefix hits, since windows are not in the tree.
    #[serde(default = "default_true")]
    pub encoder_replay: bool,
    /// Run the decoder half on the last rows of a prompt only.
    #[serde(default = "default_true")]
    pub decoder_replay: bool,
    /// Keep finished pages for later requests.
    #[serde(default = "default_true")]
    pub radix_cache: bool,
    /// Order of the waiting queue.
    #[serde(default = "default_policy")]
    pub policy: Policy,
    /// Who gives pages back first.
    #[serde(default)]
    pub retraction_policy: RetractionPolicy,
    /// Let decode rows ride along in PREFILL steps.
    #[serde(default)]
    pub mixed_chunk: bool,
    /// DECODE steps that follow a PREFILL step at least, while anything runs.
    #[serde(default)]
    pub prefill_decode_interval: u32,
    /// Scales the share of the output limits that admission reserves.
    #[serde(default = "default_conservativeness")]
    pub conservativeness: f64,
    /// Steps that may be planned and not applied.
    #[serde(default = "default_steps")]
    pub max_steps_in_flight: u32,
    /// Largest compression ratio that keeps state between rows (2 for V4.1).
    #[serde(default = "default_ratio")]
    pub stateful_ratio: u32,
    /// Ids that end an output unless `ignore_eos`.
    #[serde(default)]
    pub eos_token_ids: Vec<u32>,
}

fn default_true() -> bool {
    true
}
fn default_max_prefill_tokens() -> u32 {
    16_384
}
fn default_policy() -> Policy {
    Policy::Fcfs
}
fn default_conservativeness() -> f64 {
    1.0
}
fn default_steps() -> u32 {
    2
}
fn default_ratio() -> u32 {
    2
}

impl SchedulerConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// [`SchedulerError::Config`] with one line for each wrong value.
    pub fn validate(&self) -> Result<()> {
        let mut problems = Vec::new();
        self.check_sizes(&mut problems);
        self.check_chunk(&mut problems);
        if !(self.conservativeness.is_finite() && self.conservativeness >= 0.0) {
            problems.push(format!(
                "conservativeness is {}, must be a finite number of at least 0",
                self.conservativeness
            ));
        }
        if !(1..=2).contains(&self.max_steps_in_flight) {
            problems.push(format!(
                "max_steps_in_flight is {}, must be 1 or 2",
                self.max_steps_in_flight
            ));
        }
        for id in self
            .eos_token_ids
            .iter()
            .filter(|id| **id >= self.vocab_size)
        {
            problems.push(format!(
                "eos_token_ids holds {id}, vocab_size is {}",
                self.vocab_size
            ));
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(SchedulerError::Config { problems })
        }
    }

    /// Rows a PREFILL step may have; without chunking, enough for the longest prompt in one step.
    #[must_use]
    pub fn prefill_rows(&self) -> u32 {
        u32::try_from(self.chunked_prefill_size).unwrap_or_else(|_| {
            self.context_length.max(self.max_prefill_tokens)
                + self.replay_window()
                + self.mixed_rows()
        })
    }

    /// Columns of the page table: pages of the longest request.
    #[must_use]
    pub fn columns(&self) -> u32 {
        self.context_length.div_ceil(self.page_size)
    }

    /// Whether prompts are matched against and kept in the tree.
    #[must_use]
    pub fn uses_tree(&self) -> bool {
        self.radix_cache && self.encoder_replay
    }

    /// Rows that every PREFILL step has for prompts, however many decode rows ride along.
    pub(crate) fn least_prefill_rows(&self) -> u32 {
        self.prefill_rows() - self.mixed_rows()
    }

    /// Decode rows that may ride along in a PREFILL step.
    fn mixed_rows(&self) -> u32 {
        if self.mixed_chunk {
            self.max_running_requests
        } else {
            0
        }
    }

    /// Replay rows of a request that hit the cache.
    pub(crate) fn replay_window(&self) -> u32 {
        if self.encoder_replay {
            self.window
        } else {
            0
        }
    }

    fn check_sizes(&self, problems: &mut Vec<String>) {
        let positive = [
            ("page_size", self.page_size),
            ("num_pages", self.num_pages),
            ("max_running_requests", self.max_running_requests),
            ("max_prefill_tokens", self.max_prefill_tokens),
            ("context_length", self.context_length),
            ("window", self.window),
            ("vocab_size", self.vocab_size),
            ("stateful_ratio", self.stateful_ratio),
        ];
        for (name, value) in positive {
            if value == 0 {
                problems.push(format!("{name} is 0, must be at least 1"));
            } else if value > i32::MAX as u32 / 4 {
                problems.push(format!("{name} is {value}, must be below 2^29"));
            }
        }
        if self.page_size > 0 && !self.page_size.is_power_of_two() {
            problems.push(format!(
                "page_size is {}, must be a power of two",
                self.page_size
            ));
        }
        if self.stateful_ratio > 0 && self.page_size % self.stateful_ratio != 0 {
            problems.push(format!(
                "page_size is {}, must be a multiple of the compression ratio {}",
                self.page_size, self.stateful_ratio
            ));
        }
    }

    fn check_chunk(&self, problems: &mut Vec<String>) {
        if self.chunked_prefill_size == -1 {
            return;
        }
        let decode_rows = self.mixed_rows();
        // A last chunk may have to hold a window and an unaligned page more, so the bound holds
        // with encoder replay off as well.
        let least = i64::from(self.window) + i64::from(self.page_size) + i64::from(decode_rows);
        if self.chunked_prefill_size < least || self.chunked_prefill_size > i64::from(i32::MAX / 4)
        {
            problems.push(format!(
                "chunked_prefill_size is {}, must be -1 or at least {least} (window {} + page {}{})",
                self.chunked_prefill_size,
                self.window,
                self.page_size,
                if self.mixed_chunk {
                    format!(" + {decode_rows} decode rows of mixed steps")
                } else {
                    String::new()
                }
            ));
        }
    }
}
