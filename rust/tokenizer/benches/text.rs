//! Encoding, and decoding of many streams in one call. `DSSERVE_BENCH_TOKENIZER` names a
//! `tokenizer.json`; without it a tiny built-in one is used, which says little about speed.

use criterion::{criterion_group, criterion_main, BatchSize, Criterion, Throughput};
use dsserve_tokenizer::{
    Backend, StopRegex, StreamOptions, StreamTable, TextStream, TokenBatch, Tokenizer,
    TokenizerOptions,
};
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;

const SENTENCES: &str = "The scheduler decides what runs next; nothing else does.\n\
    def step(self, batch: list[int]) -> dict[str, float]:\n        return {\"loss\": sum(batch) / 3.14}\n\
    今天天气很好，我们去公园散步。模型的输出是一个流，每一步都有新的词。\n";

fn tokenizer(backend: Backend) -> Tokenizer {
    let path = std::env::var_os("DSSERVE_BENCH_TOKENIZER").map(PathBuf::from);
    let path = path.unwrap_or_else(|| {
        dsserve_tokenizer::testing::example_tokenizer().expect("the temporary folder is writable")
    });
    Tokenizer::load(&path, &TokenizerOptions::default().with_backend(backend))
        .expect("a usable tokenizer")
}

fn encode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("encode");
    for (name, len) in [("4KB", 4 << 10), ("440KB", 440 << 10)] {
        let text = SENTENCES.repeat(len / SENTENCES.len());
        group.throughput(Throughput::Bytes(text.len() as u64));
        for (backend_name, backend) in
            [("fast", Backend::Fast), ("reference", Backend::HuggingFace)]
        {
            let tokenizer = tokenizer(backend);
            group.bench_function(format!("{backend_name}/{name}"), |bencher| {
                bencher.iter(|| tokenizer.encode(black_box(&text), true).expect("any text"));
            });
        }
    }
    // No words to look up: merges alone.
    let tokenizer = tokenizer(Backend::Fast);
    for unit in ["a", "ab", "今天天气"] {
        let text = unit.repeat((1 << 20) / unit.len());
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.bench_function(format!("one word of 1MB/{unit}"), |bencher| {
            bencher.iter(|| tokenizer.encode(black_box(&text), true).expect("any text"));
        });
    }
    group.finish();
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    let tokenizer = tokenizer(Backend::Fast);
    let ids = tokenizer.encode(SENTENCES, true).expect("any text");
    for num_streams in [64u32, 1024] {
        let names: Vec<u64> = (0..u64::from(num_streams)).collect();
        let offsets: Vec<u32> = (0..=num_streams).collect();
        let step: Vec<u32> = ids.iter().copied().cycle().take(names.len()).collect();
        group.throughput(Throughput::Elements(u64::from(num_streams)));
        group.bench_function(format!("step of {num_streams} streams"), |bencher| {
            bencher.iter_batched_ref(
                || {
                    let mut table = StreamTable::new(Arc::clone(tokenizer.table()));
                    for &name in &names {
                        table
                            .open(name, StreamOptions::default())
                            .expect("names differ");
                    }
                    table
                },
                |table| {
                    let batch = TokenBatch {
                        names: &names,
                        offsets: &offsets,
                        ids: &step,
                        ends: &[],
                    };
                    table.push(batch).expect("offsets fit")
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

/// What patterns near their limits cost, beside an ordinary one and none.
fn stop_patterns(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("stop patterns");
    let tokenizer = tokenizer(Backend::Fast);
    let text = "the scheduler decides what runs next and nothing else does ".repeat(50);
    let ids = tokenizer.encode(&text, true).expect("any text");
    group.throughput(Throughput::Bytes(text.len() as u64));
    for pattern in [
        "",
        r"\n[0-9]+\.",
        r"(?i)the end",
        "(?:[a-z ]?){1000}Q",
        "(?s).{1,600}Q",
        "(?:a?b?c?d?e?f?g?h?i?l?o?r?s?t?w? ?){60}Q",
    ] {
        let patterns = Vec::from_iter((!pattern.is_empty()).then(|| pattern.to_owned()));
        let options = StreamOptions {
            stop_regex: StopRegex::new(patterns).expect("good").map(Arc::new),
            ..StreamOptions::default()
        };
        group.bench_function(format!("of {pattern:?}"), |bencher| {
            bencher.iter_batched_ref(
                || TextStream::new(Arc::clone(tokenizer.table()), options.clone()),
                |stream| stream.push(black_box(&ids)),
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, encode, decode, stop_patterns);
criterion_main!(benches);
