//! A fake device and a harness around a scheduler, shared by the integration tests.
#![allow(
    dead_code,
    reason = "each test binary uses a part of the shared module"
)]

pub mod device;
pub mod harness;
pub mod oracle;
pub mod steps;

use dsserve_scheduler::{RequestSpec, SchedulerConfig};

/// Ids of the tests' vocabulary; 1 ends a sequence.
pub const VOCAB: u32 = 40;
pub const EOS: u32 = 1;

/// A small configuration on which every rule shows within a few steps.
pub fn config() -> SchedulerConfig {
    SchedulerConfig {
        page_size: 4,
        num_pages: 64,
        max_running_requests: 4,
        chunked_prefill_size: 24,
        max_prefill_tokens: 64,
        context_length: 200,
        window: 8,
        vocab_size: VOCAB,
        eos_token_ids: vec![EOS],
        ..SchedulerConfig::default()
    }
}

/// A request that only its output limit ends.
pub fn spec(request_id: u64, token_ids: Vec<u32>, max_new_tokens: u32) -> RequestSpec {
    RequestSpec {
        request_id,
        token_ids,
        max_new_tokens,
        ignore_eos: true,
        ..RequestSpec::default()
    }
}

/// Prompt number `family` of `len` tokens: prompts of a family share all but their lengths.
pub fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|position| {
            2 + oracle::mix(u64::from(family) << 32 | u64::from(position)) % (VOCAB - 2)
        })
        .collect()
}
