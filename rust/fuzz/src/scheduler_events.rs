//! Events of the scheduler in any order, under any configuration, against the fake device and the
//! oracle of the crate's own property tests: they check invariants, plans, every row that a step reads
//! and every output, after each event.

use crate::bytes::Bytes;
use crate::scheduler_model::{self as model, harness::Harness};
use dsserve_scheduler::{
    EvictionPolicy, Namespace, Policy, PriorityConfig, RequestSpec, RetractionPolicy,
    SchedulerConfig,
};

const POLICIES: [Policy; 7] = [
    Policy::Fcfs,
    Policy::Lpm,
    Policy::DfsWeight,
    Policy::Hrrn,
    Policy::ShortestPrefillFirst,
    Policy::Lof,
    Policy::Random,
];
const EVICTION: [EvictionPolicy; 6] = [
    EvictionPolicy::Lru,
    EvictionPolicy::Lfu,
    EvictionPolicy::Slru,
    EvictionPolicy::Fifo,
    EvictionPolicy::Priority,
    EvictionPolicy::Cost,
];
const RETRACTION: [RetractionPolicy; 3] = [
    RetractionPolicy::Length,
    RetractionPolicy::Priority,
    RetractionPolicy::Cost,
];
const MAX_EVENTS: usize = 300;

/// Runs events; in the end every request must have ended as it does alone, and nothing may be left.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let config = config(&mut bytes);
    if config.validate().is_err() {
        return;
    }
    let mut harness = Harness::new(&config);
    harness.device.accepts_all = bytes.one_in(4);
    let drain_depth = (1 + bytes.below(2)).min(config.max_steps_in_flight as usize);
    let mut next_id = 1;
    for _ in 0..MAX_EVENTS {
        if bytes.is_empty() {
            break;
        }
        event(&mut harness, &mut bytes, &mut next_id);
        harness.scheduler.check_invariants().expect("invariants");
    }
    harness.drain(drain_depth);
    harness.check_end();
}

fn config(bytes: &mut Bytes<'_>) -> SchedulerConfig {
    let page_size = 2 << bytes.below(4);
    let window = [4, 8, 12, 16][bytes.below(4)];
    let max_running_requests = 1 + u32::from(bytes.byte() % 6);
    let mixed_chunk = bytes.one_in(2);
    let mixed_rows = if mixed_chunk { max_running_requests } else { 0 };
    let chunk = window + page_size * (1 + u32::from(bytes.byte() % 4)) + mixed_rows;
    SchedulerConfig {
        page_size,
        window,
        num_pages: (80 + 2 * u32::from(bytes.byte())) / page_size,
        max_running_requests,
        max_queued_requests: bytes.one_in(4).then_some(4),
        chunked_prefill_size: if bytes.one_in(8) {
            -1
        } else {
            i64::from(chunk)
        },
        max_prefill_tokens: 1 + u32::from(bytes.byte() % 80),
        prefill_max_requests: bytes.one_in(4).then(|| 1 + u32::from(bytes.byte() % 3)),
        prefill_max_defer: u32::from(bytes.byte() % 4),
        auto_truncate: false,
        encoder_replay: !bytes.one_in(4),
        decoder_replay: !bytes.one_in(4),
        radix_cache: !bytes.one_in(8),
        eviction_policy: EVICTION[bytes.below(EVICTION.len())],
        policy: POLICIES[bytes.below(POLICIES.len())],
        policy_seed: u64::from(bytes.byte()),
        max_overtake: 1 + u32::from(bytes.byte() % 5),
        inbatch_prefix_hold: u32::from(bytes.byte() % 4),
        priority: PriorityConfig {
            enabled: bytes.one_in(2),
            low_values_first: bytes.one_in(2),
            preemption: !bytes.one_in(4),
            preemption_threshold: u32::from(bytes.byte() % 20),
            refuse_when_disabled: bytes.one_in(8),
        },
        fair: bytes.one_in(2),
        waiting_timeout_us: timeout(bytes),
        running_timeout_us: timeout(bytes),
        retraction_policy: RETRACTION[bytes.below(RETRACTION.len())],
        mixed_chunk,
        prefill_decode_interval: u32::from(bytes.byte() % 3),
        overlap_prefills: !bytes.one_in(4),
        conservativeness: [0.0, 0.0, 0.3, 2.0][bytes.below(4)],
        max_steps_in_flight: 2 - u32::from(bytes.one_in(8)),
        draft_len: [0, 0, 1, 2, 3, 5][bytes.below(6)],
        ..model::config()
    }
}

fn timeout(bytes: &mut Bytes<'_>) -> Option<u64> {
    bytes
        .one_in(8)
        .then(|| 1 + u64::from(bytes.short() % 3_000))
}

fn event(harness: &mut Harness, bytes: &mut Bytes<'_>, next_id: &mut u64) {
    let may_launch = harness.scheduler.steps_in_flight()
        < harness.scheduler.config().max_steps_in_flight as usize;
    match bytes.below(16) {
        0..=3 => {
            let spec = spec(harness, bytes, next_id);
            harness.submit(spec);
        }
        4..=7 if may_launch => {
            harness.launch();
        }
        4..=10 => {
            harness.apply();
        }
        11 => {
            let id = any_id(harness, bytes);
            harness.abort(id);
        }
        12 => {
            let id = any_id(harness, bytes);
            harness.finish(id, u32::from(bytes.byte() % 20));
        }
        13 => {
            let id = any_id(harness, bytes);
            harness.poison(id);
        }
        14 => {
            // Refused while anything holds pages, which changes nothing.
            let _ = harness.scheduler.flush();
        }
        _ => harness.now_us += u64::from(bytes.byte()),
    }
}

/// A request that shares prefixes with others; now and then one that must be refused.
fn spec(harness: &Harness, bytes: &mut Bytes<'_>, next_id: &mut u64) -> RequestSpec {
    let mut token_ids = model::prompt(u32::from(bytes.byte() % 3), u32::from(bytes.byte() % 90));
    let own = u32::from(bytes.byte() % 3);
    token_ids.extend(model::prompt(7 + own, own));
    if bytes.one_in(64) {
        token_ids.push(model::VOCAB);
    }
    let max_new_tokens = u32::from(bytes.byte() % 80);
    let twice = bytes.one_in(32).then(|| any_id(harness, bytes));
    let request_id = twice.filter(|&id| id > 0).unwrap_or(*next_id);
    *next_id += u64::from(request_id == *next_id);
    RequestSpec {
        min_new_tokens: u32::from(bytes.byte() % 6),
        ignore_eos: bytes.one_in(2),
        stop_token_ids: (0..bytes.below(3))
            .map(|_| 1 + u32::from(bytes.byte()) % 39)
            .collect(),
        priority: (!bytes.one_in(3)).then(|| i32::from(bytes.byte() % 40) - 9),
        tenant: u64::from(bytes.byte() % 3),
        deadline_us: bytes
            .one_in(8)
            .then(|| harness.now_us + u64::from(bytes.short() % 3_000)),
        draft_len: bytes.one_in(4).then(|| u32::from(bytes.byte() % 6)),
        namespace: Namespace {
            cache_salt: bytes.one_in(8).then(String::new),
            ..Namespace::default()
        },
        arrival_us: harness.now_us,
        whole_extend: bytes.one_in(8),
        ..model::spec(request_id, token_ids, max_new_tokens)
    }
}

/// That of a request that has not ended, if there is one.
fn any_id(harness: &Harness, bytes: &mut Bytes<'_>) -> u64 {
    let live = harness.live();
    let which = bytes.below(256);
    live.get(which % live.len().max(1)).copied().unwrap_or(0)
}
