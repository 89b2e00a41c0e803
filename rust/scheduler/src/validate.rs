//! Which values of a `SchedulerConfig` are wrong? Every one is named at once.
use crate::config::SchedulerConfig;
use crate::error::{Result, SchedulerError};

/// Draft tokens of a row at most: far above any block size, so that sums stay small.
const MAX_DRAFT_LEN: u32 = 255;

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
        if self.draft_len > MAX_DRAFT_LEN {
            problems.push(format!(
                "draft_len is {}, must be at most {MAX_DRAFT_LEN}",
                self.draft_len
            ));
        }
        self.check_capacity(&mut problems);
        if self.prefill_max_requests == Some(0) {
            problems.push("prefill_max_requests is 0, must be at least 1".to_owned());
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
            ("max_overtake", self.max_overtake),
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
        if self.stateful_ratio > 0 && !self.page_size.is_multiple_of(self.stateful_ratio) {
            problems.push(format!(
                "page_size is {}, must be a multiple of the compression ratio {}",
                self.page_size, self.stateful_ratio
            ));
        }
    }

    /// Each value may be right and the arrays of a plan still be too long for their indices.
    fn check_capacity(&self, problems: &mut Vec<String>) {
        if !problems.is_empty() {
            return;
        }
        let requests = u64::from(self.max_running_requests);
        let rows = (requests * u64::from(self.draft_len + 1)).max(u64::from(self.prefill_rows()));
        let page_size = u64::from(self.page_size);
        let entries = u64::from(self.columns()) + 4 * (rows.div_ceil(page_size) + requests);
        for (what, count) in [("rows", rows), ("page-table entries", entries)] {
            if count > i32::MAX as u64 {
                problems.push(format!(
                    "a step could have {count} {what}, more than 2^31: max_running_requests is \
                     {requests}, draft_len {}, chunked_prefill_size {}",
                    self.draft_len, self.chunked_prefill_size
                ));
            }
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
