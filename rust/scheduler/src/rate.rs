//! How fast are prompts computed, and when could a new one start?
use std::collections::btree_map::{BTreeMap, Entry};

use crate::request::RequestSpec;
use crate::scheduler::Scheduler;

/// Weight of the past in each new measurement.
const MEMORY: f64 = 0.9;

/// Prefill tokens per microsecond of the steps that had any, over the last tens of them.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct PrefillRate {
    tokens: f64,
    time_us: f64,
    /// When the last step was applied: the next one had the device from then on.
    last_applied_us: u64,
}

impl PrefillRate {
    /// Notes a step that was applied now.
    pub fn note(&mut self, tokens: u32, planned_us: u64, now_us: u64) {
        let began_us = planned_us.max(self.last_applied_us);
        self.last_applied_us = now_us;
        if tokens == 0 {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "a step takes less than 2^52 us")]
        let took_us = now_us.saturating_sub(began_us) as f64;
        self.tokens = self.tokens * MEMORY + f64::from(tokens);
        self.time_us = self.time_us * MEMORY + took_us;
    }

    /// Tokens per microsecond; none before any step took time.
    pub fn per_us(&self) -> Option<f64> {
        (self.time_us > 0.0).then(|| self.tokens / self.time_us)
    }
}

/// Uncached tokens of the waiting requests, by priority class.
#[derive(Debug, Default)]
pub(crate) struct QueuedTokens {
    by_class: BTreeMap<i64, u64>,
    total: u64,
}

impl QueuedTokens {
    pub fn add(&mut self, class: i64, tokens: u32) {
        *self.by_class.entry(class).or_default() += u64::from(tokens);
        self.total += u64::from(tokens);
    }

    /// Takes back what was added before.
    pub fn remove(&mut self, class: i64, tokens: u32) {
        if let Entry::Occupied(mut entry) = self.by_class.entry(class) {
            *entry.get_mut() -= u64::from(tokens);
            if *entry.get() == 0 {
                entry.remove();
            }
        }
        self.total -= u64::from(tokens);
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// Those of the classes up to `class`: of whoever goes before a newcomer of it.
    pub fn up_to(&self, class: i64) -> u64 {
        self.by_class
            .range(..=class)
            .map(|(_, tokens)| tokens)
            .sum()
    }

    pub fn by_class(&self) -> &BTreeMap<i64, u64> {
        &self.by_class
    }
}

impl Scheduler {
    /// When a request that arrives now could start, if prompts went on being computed as fast as
    /// they were; none before that was measured.
    ///
    /// Counts the uncached tokens of the requests that go before it.
    pub(crate) fn estimated_start_us(&self, spec: &RequestSpec) -> Option<u64> {
        let rate = self.prefill_rate.per_us()?;
        let mut tokens = if self.config.priority.enabled {
            self.queued_tokens.up_to(self.class_of(spec))
        } else {
            self.queued_tokens.total()
        };
        if let Some(key) = self.carried {
            let request = self.requests.live(key);
            tokens += u64::from(request.prefill_len - request.planned_len);
        }
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an estimate; the cast saturates"
        )]
        let wait_us = (tokens as f64 / rate) as u64;
        Some(self.now_us.max(spec.arrival_us).saturating_add(wait_us))
    }
}
