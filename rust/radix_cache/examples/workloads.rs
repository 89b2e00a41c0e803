//! The cache workloads of the peer comparison: `chat`, `sysmix` and `evict`, with memory.
//!
//! `cargo run --release -p dsserve-radix-cache --example workloads`. One JSON object a line; times
//! are means in microseconds an operation over all rounds, warm.

use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};

use dsserve_radix_cache::{CacheConfig, Namespace, PageId, RadixCache};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A small generator, so that runs repeat.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(((self.0 >> 32) * u64::from(bound)) >> 32).unwrap_or(0)
    }

    fn tokens(&mut self, len: usize) -> Vec<u32> {
        (0..len).map(|_| self.below(129_280)).collect()
    }
}

/// Times of the operations of one workload.
#[derive(Default)]
struct Times {
    num_turns: u32,
    num_tokens: usize,
    num_cached: usize,
    evict: Duration,
    find: Duration,
    insert: Duration,
}

impl Times {
    fn report(&self, workload: &str, page_size: u32, more: &str) -> Outcome<()> {
        let mean = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(self.num_turns);
        let nanoseconds = |time: Duration| {
            time.as_secs_f64() * 1e9 / f64::from(u32::try_from(self.num_tokens).unwrap_or(u32::MAX))
        };
        writeln!(
            std::io::stdout(),
            "{{\"workload\":\"{workload}\",\"page_size\":{page_size},\"turns\":{},\"tokens\":{},\
             \"cached_tokens\":{},\"match_us\":{:.2},\"match_ns_token\":{:.3},\"insert_us\":{:.2},\
             \"match_insert_ns_token\":{:.3},\"evict_us\":{:.2},\"turn_us\":{:.2}{more}}}",
            self.num_turns,
            self.num_tokens,
            self.num_cached,
            mean(self.find),
            nanoseconds(self.find),
            mean(self.insert),
            nanoseconds(self.find + self.insert),
            mean(self.evict),
            mean(self.evict + self.find + self.insert),
        )?;
        Ok(())
    }
}

/// Matches a prompt, evicts if needed, and inserts its whole pages from the matched node on.
///
/// `insert` counts everything but the match: lock, page allocation, insert, unlock.
fn turn(cache: &mut RadixCache, tokens: &[u32], times: &mut Times) -> Outcome<()> {
    let namespace = Namespace::default();
    let page_size = cache.config().page_size;
    let start = Instant::now();
    let found = cache.match_prefix(&namespace, tokens);
    let matched = Instant::now();
    let receipt = cache.lock(found.node)?;
    let num_pages = u32::try_from(tokens.len())? / page_size;
    let mut row: Vec<PageId> = found.pages;
    let wanted = num_pages - found.cached_len / page_size;
    let locked = Instant::now();
    if wanted > cache.num_free() {
        cache.evict(wanted - cache.num_free());
    }
    let evicted = Instant::now();
    if !cache.allocate(wanted, &mut row) {
        return Err("the cache is too small for this workload".into());
    }
    let whole = &tokens[..(num_pages * page_size) as usize];
    cache.insert_at(&namespace, found.node, whole, &row)?;
    cache.unlock(receipt);
    let end = Instant::now();

    times.num_turns += 1;
    times.num_tokens += tokens.len();
    times.num_cached += found.cached_len as usize;
    times.find += matched - start;
    times.evict += evicted - locked;
    times.insert += (locked - matched) + (end - evicted);
    Ok(())
}

fn new_cache(page_size: u32, num_tokens: u32) -> Outcome<RadixCache> {
    Ok(RadixCache::new(CacheConfig::new(
        page_size,
        num_tokens.div_ceil(page_size),
    ))?)
}

/// Eight conversations with one system prompt grow by 4096 tokens a turn to 128K.
fn chat(page_size: u32) -> Outcome<()> {
    let mut random = Random(1);
    let system = random.tokens(4096);
    let conversations: Vec<Vec<u32>> = (0..8)
        .map(|_| [system.clone(), random.tokens(126_976)].concat())
        .collect();
    let mut times = Times::default();
    for _ in 0..3 {
        let mut cache = new_cache(page_size, 1 << 20)?;
        for end in (8192..=131_072).step_by(4096) {
            for conversation in &conversations {
                turn(&mut cache, &conversation[..end], &mut times)?;
            }
        }
        cache.check_invariants()?;
    }
    times.report("chat/128K", page_size, "")
}

/// 10,000 prompts of one of 32 system prompts (Zipf) and 512 own tokens.
fn sysmix(page_size: u32) -> Outcome<()> {
    let mut random = Random(2);
    let systems: Vec<Vec<u32>> = (0..32).map(|_| random.tokens(2048)).collect();
    // Weight 1/rank in units of 1/5040; 32 ranks sum to 20,451.
    let weights: Vec<u32> = (1..=32).map(|rank| 5040 / rank).collect();
    let prompts: Vec<Vec<u32>> = (0..10_000)
        .map(|_| {
            let mut draw = random.below(weights.iter().sum());
            let mut rank = 0;
            while draw >= weights[rank] {
                draw -= weights[rank];
                rank += 1;
            }
            [systems[rank].clone(), random.tokens(512)].concat()
        })
        .collect();
    let mut times = Times::default();
    let mut cache = new_cache(page_size, 6 << 20)?;
    let before = resident_bytes()?;
    for prompt in &prompts {
        turn(&mut cache, prompt, &mut times)?;
    }
    let used = resident_bytes()?.saturating_sub(before);
    let cached = u64::from(cache.num_evictable()) * u64::from(page_size);
    cache.check_invariants()?;
    #[expect(clippy::cast_precision_loss, reason = "a figure to print")]
    let more = format!(",\"bytes_token\":{:.2}", used as f64 / cached as f64);
    times.report("sysmix/10000", page_size, &more)
}

/// A full cache of unrelated 512-token leaves; each new one takes the place of the oldest.
fn evict(page_size: u32, num_leaves: u32) -> Outcome<()> {
    let mut random = Random(3);
    let mut cache = new_cache(page_size, num_leaves * 512)?;
    let mut filling = Times::default();
    for _ in 0..num_leaves {
        turn(&mut cache, &random.tokens(512), &mut filling)?;
    }
    let mut times = Times::default();
    for _ in 0..20_000 {
        turn(&mut cache, &random.tokens(512), &mut times)?;
    }
    cache.check_invariants()?;
    times.report(&format!("evict/{num_leaves}leaves"), page_size, "")
}

/// Resident memory of this process; needs Linux.
fn resident_bytes() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(kilobytes.ok_or("no VmRSS")?.parse::<u64>()? * 1024)
}

fn main() -> Outcome<()> {
    for page_size in [64, 128, 256, 1] {
        chat(page_size)?;
        sysmix(page_size)?;
        evict(page_size, 1024)?;
        evict(page_size, 8192)?;
    }
    Ok(())
}
