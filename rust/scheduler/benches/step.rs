//! Cost of `next_plan` plus `apply` for a DECODE step of 64, 256 and 1024 running requests.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "criterion's macros define public functions; a failed unwrap ends the benchmark"
)]

use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};
use dsserve_scheduler::{Phase, RequestSpec, Scheduler, SchedulerConfig};

/// Steps after which a fresh scheduler is built, so that outputs stay below their limit.
const STEPS: u64 = 2_000;
const PROMPT_LEN: u32 = 64;

fn running(num_requests: u32) -> Scheduler {
    started(num_requests, 0)
}

fn running_with_drafts(num_requests: u32) -> Scheduler {
    started(num_requests, 3)
}

fn started(num_requests: u32, draft_len: u32) -> Scheduler {
    let pages_each = (PROMPT_LEN + 2_200).div_ceil(128) + 1;
    let mut scheduler = Scheduler::new(SchedulerConfig {
        page_size: 128,
        num_pages: num_requests * pages_each + 2_048,
        max_running_requests: num_requests + 1,
        draft_len,
        chunked_prefill_size: 8192,
        max_prefill_tokens: 16_384,
        context_length: 131_072,
        window: 128,
        vocab_size: 129_280,
        eos_token_ids: vec![1],
        ..SchedulerConfig::default()
    })
    .unwrap();
    let spec = |request_id: u32| RequestSpec {
        request_id: u64::from(request_id),
        token_ids: (0..PROMPT_LEN)
            .map(|p| 2 + (request_id * 131 + p) % 120_000)
            .collect(),
        max_new_tokens: 2_200,
        ignore_eos: true,
        ..RequestSpec::default()
    };
    assert!(scheduler
        .submit((0..num_requests).map(spec).collect())
        .is_empty());
    while step(&mut scheduler) == Phase::Prefill {}
    assert_eq!(scheduler.stats().num_running, num_requests as usize);
    scheduler
}

fn step(scheduler: &mut Scheduler) -> Phase {
    let plan = scheduler.next_plan(0).unwrap().unwrap();
    let (step_id, phase, len) = (plan.step_id, plan.phase, plan.request_id.len());
    let (ids, status) = (vec![7; len], vec![0; len]);
    scheduler.apply(step_id, &ids, &status, 0).unwrap();
    phase
}

fn verify_step(scheduler: &mut Scheduler) {
    let plan = scheduler.next_plan(0).unwrap().unwrap();
    let (step_id, len) = (plan.step_id, plan.request_id.len());
    let counts: Vec<u32> = plan
        .draft_len
        .iter()
        .map(|drafts| 1 + u32::try_from(*drafts).unwrap() / 2)
        .collect();
    let ids = vec![7; counts.iter().sum::<u32>() as usize];
    let status = vec![0; len];
    scheduler
        .apply_runs(step_id, &ids, &counts, &status, 0)
        .unwrap();
}

fn decode_steps(num_requests: u32, iterations: u64) -> Duration {
    let mut total = Duration::ZERO;
    let mut left = iterations;
    while left > 0 {
        let mut scheduler = running(num_requests);
        let steps = left.min(STEPS);
        let start = Instant::now();
        for _ in 0..steps {
            step(&mut scheduler);
        }
        total += start.elapsed();
        left -= steps;
    }
    total
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode_step");
    group.sample_size(20);
    group.warm_up_time(Duration::from_millis(300));
    group.measurement_time(Duration::from_secs(2));
    for num_requests in [64, 256, 1024] {
        group.throughput(Throughput::Elements(u64::from(num_requests)));
        group.bench_function(BenchmarkId::from_parameter(num_requests), |bencher| {
            bencher.iter_custom(|iterations| decode_steps(num_requests, iterations));
        });
    }
    group.finish();
}

/// A step with drafts, of which half are accepted.
fn verify(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("verify_step");
    group.sample_size(20);
    group.warm_up_time(Duration::from_millis(300));
    group.measurement_time(Duration::from_secs(2));
    for num_requests in [64, 256] {
        group.throughput(Throughput::Elements(u64::from(num_requests)));
        group.bench_function(BenchmarkId::from_parameter(num_requests), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                let mut left = iterations;
                while left > 0 {
                    let mut scheduler = running_with_drafts(num_requests);
                    let steps = left.min(STEPS / 4);
                    let start = Instant::now();
                    for _ in 0..steps {
                        verify_step(&mut scheduler);
                    }
                    total += start.elapsed();
                    left -= steps;
                }
                total
            });
        });
    }
    group.finish();
}

/// A 128K prompt: submitted, planned and applied in chunks of 8,192 beside 256 running requests.
fn long_prompt(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prompt_128k_beside_256");
    group.sample_size(10);
    group.measurement_time(Duration::from_secs(2));
    let prompt: Vec<u32> = (0..131_000).map(|p| 2 + (p * 17) % 120_000).collect();
    group.bench_function("all_steps", |bencher| {
        bencher.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            for _ in 0..iterations {
                let mut scheduler = running(256);
                let token_ids = prompt.clone();
                let start = Instant::now();
                scheduler.submit(vec![RequestSpec {
                    request_id: 1 << 40,
                    token_ids,
                    max_new_tokens: 4,
                    ..RequestSpec::default()
                }]);
                while step(&mut scheduler) == Phase::Prefill {}
                total += start.elapsed();
            }
            total
        });
    });
    group.finish();
}

criterion_group!(benches, decode, verify, long_prompt);
criterion_main!(benches);
