//! What is left in the step being built, and how much output admission reserves.
use crate::config::SchedulerConfig;
use crate::request::Request;

/// Share of the output limits reserved at start, per unit of conservativeness.
const INITIAL_RATIO: f64 = 0.7;
/// Where the share ends up, relative to the start.
const FINAL_SHARE: f64 = 0.14;
/// DECODE steps over which it decays.
const DECAY_STEPS: f64 = 600.0;
/// Longest output that is reserved for a request that may stop by itself.
const MAX_EXPECTED: u32 = 4096;
/// Tokens per request added to the ratio after a retraction.
const RETRACT_MARGIN: f64 = 20.0;

/// The new-token ratio (`serving.md` a.7): the part of its output limit a request is expected to use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewTokenRatio {
    current: f64,
    least: f64,
    decay: f64,
}

impl NewTokenRatio {
    pub fn new(config: &SchedulerConfig) -> Self {
        let start = (INITIAL_RATIO * config.conservativeness).min(1.0);
        let least = start * FINAL_SHARE;
        Self {
            current: start,
            least,
            decay: (start - least) / DECAY_STEPS,
        }
    }

    pub fn value(&self) -> f64 {
        self.current
    }

    /// Call after each DECODE step.
    pub fn decay(&mut self) {
        self.current = (self.current - self.decay).max(self.least);
    }

    /// Call after a retraction, with the requests that go on.
    pub fn reset<'a>(&mut self, running: impl Iterator<Item = &'a Request>) {
        let (mut decoded, mut limits) = (0.0, 0.0);
        for request in running {
            decoded += f64::from(request.output_len()) + RETRACT_MARGIN;
            limits += f64::from(request.spec.max_new_tokens);
        }
        if limits > 0.0 {
            self.current = (decoded / limits).clamp(self.least, 1.0);
        }
    }

    /// Output tokens that `request` is expected to get beyond the planned steps, at least one
    /// while it may get any.
    pub fn expected(&self, request: &Request) -> u32 {
        let remaining = request.remaining();
        if request.spec.ignore_eos {
            return remaining;
        }
        let scaled = f64::from(remaining.min(MAX_EXPECTED)) * self.current;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and 4096"
        )]
        let expected = scaled.ceil() as u32;
        expected.max(1).min(remaining)
    }
}

/// Room in the PREFILL step being built.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// Rows for prompts, replay rows included.
    rows: u32,
    /// Prompts that may still join.
    requests: u32,
    /// New prompt tokens after which no further request joins.
    prefill_tokens: u32,
    /// New tokens that the first prompt may bring.
    first_tokens: u32,
    /// Hit pages whose table entries still fit the plan.
    hit_pages: u32,
    is_untouched: bool,
}

impl Budget {
    pub fn new(config: &SchedulerConfig, decode_rows: u32) -> Self {
        Self {
            rows: config.prefill_rows() - decode_rows,
            requests: config.prefill_max_requests.unwrap_or(u32::MAX),
            prefill_tokens: config.max_prefill_tokens,
            first_tokens: config.chunk_tokens(),
            hit_pages: config.columns(),
            is_untouched: true,
        }
    }

    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Room for the first prompt of the step, which starts with `replay` rows: its new tokens are
    /// bounded, too. Prompts that join others are measured against what is left, see `allows`.
    pub fn for_prompt(&self, replay: u32) -> Self {
        let tokens = if self.is_untouched {
            self.first_tokens
        } else {
            u32::MAX
        };
        Self {
            rows: self.rows.min(tokens.saturating_add(replay)),
            ..*self
        }
    }

    /// Room for the prompt that goes on, behind shorter ones that passed it.
    pub fn for_carried(&self) -> Self {
        let tokens = if self.is_untouched {
            self.first_tokens
        } else {
            self.prefill_tokens
        };
        Self {
            rows: self.rows.min(tokens),
            ..*self
        }
    }

    /// Whether a row of one more prompt may join.
    pub fn has_room(&self) -> bool {
        self.rows > 0 && self.requests > 0
    }

    /// Whether no prompt row is in the step yet.
    pub fn is_untouched(&self) -> bool {
        self.is_untouched
    }

    /// Whether a further request with these counts may join; the first always may.
    pub fn allows(&self, prefill_tokens: u32, hit_pages: u32) -> bool {
        self.is_untouched || (prefill_tokens <= self.prefill_tokens && hit_pages <= self.hit_pages)
    }

    /// Counts a prompt that joins, with the pages of its hit.
    pub fn take_request(&mut self, hit_pages: u32) {
        self.requests = self.requests.saturating_sub(1);
        self.hit_pages = self.hit_pages.saturating_sub(hit_pages);
        self.is_untouched = false;
    }

    /// Counts the rows of a prompt, replay rows included, and those of them that are new.
    pub fn take_rows(&mut self, rows: u32, prefill_tokens: u32) {
        self.rows -= rows;
        self.prefill_tokens = self.prefill_tokens.saturating_sub(prefill_tokens);
        self.is_untouched = false;
    }
}
