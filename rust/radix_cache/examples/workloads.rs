//! The cache workloads of the peer comparison: `chat`, `sysmix` and `evict`, with memory.
//!
//! `cargo run --release -p dsserve-radix-cache --example workloads`. One JSON object a line; times
//! are means in microseconds over the turns, of each turn the best of three runs. `memory` needs a
//! process of its own for each figure.

use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};

use dsserve_radix_cache::{
    page_hashes, CacheConfig, Component, ComponentConfig, InsertOptions, Namespace, NodeHandle,
    PageId, RadixCache, Retention, TailPages,
};

/// Tokens of the sliding window.
const WINDOW: u32 = 128;

/// Runs of each workload; of each turn the fastest counts.
const NUM_RUNS: u32 = 3;

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

/// One turn: what was asked for, and how long the operations took.
#[derive(Clone, Copy)]
struct Turn {
    num_tokens: u32,
    num_cached: u32,
    find: Duration,
    evict: Duration,
    insert: Duration,
}

impl Turn {
    /// The same turn of another run: other programs delay one or the other, never help.
    fn best(self, other: Self) -> Self {
        Self {
            find: self.find.min(other.find),
            evict: self.evict.min(other.evict),
            insert: self.insert.min(other.insert),
            ..self
        }
    }
}

/// Runs a workload [`NUM_RUNS`] times and prints means over the best of each turn.
fn report(
    workload: &str,
    page_size: u32,
    with: With,
    run: impl Fn(u32, With) -> Outcome<Vec<Turn>>,
) -> Outcome<()> {
    let mut turns = run(page_size, with)?;
    for _ in 1..NUM_RUNS {
        let again = run(page_size, with)?;
        turns = turns
            .iter()
            .zip(again)
            .map(|(turn, other)| turn.best(other))
            .collect();
    }
    let num_turns = f64::from(u32::try_from(turns.len())?);
    let num_tokens: f64 = turns.iter().map(|turn| f64::from(turn.num_tokens)).sum();
    let num_cached: f64 = turns.iter().map(|turn| f64::from(turn.num_cached)).sum();
    let sum = |time: fn(&Turn) -> Duration| turns.iter().map(time).sum::<Duration>().as_secs_f64();
    let (find, evict, insert) = (
        sum(|turn| turn.find),
        sum(|turn| turn.evict),
        sum(|turn| turn.insert),
    );
    let mut whole: Vec<Duration> = turns
        .iter()
        .map(|turn| turn.find + turn.evict + turn.insert)
        .collect();
    whole.sort_unstable();
    let p99 = whole[whole.len() * 99 / 100].as_secs_f64();
    writeln!(
        std::io::stdout(),
        "{{\"workload\":\"{workload}{}\",\"page_size\":{page_size},\"turns\":{num_turns},\
         \"hits\":{:.3},\"match_us\":{:.2},\"match_ns_token\":{:.3},\"insert_us\":{:.2},\
         \"match_insert_ns_token\":{:.3},\"evict_us\":{:.2},\"turn_us\":{:.2},\"turn_p99_us\":{:.2}}}",
        with.name(),
        num_cached / num_tokens,
        find * 1e6 / num_turns,
        find * 1e9 / num_tokens,
        insert * 1e6 / num_turns,
        (find + insert) * 1e9 / num_tokens,
        evict * 1e6 / num_turns,
        (find + evict + insert) * 1e6 / num_turns,
        p99 * 1e6,
    )?;
    Ok(())
}

/// What the cache keeps besides FULL pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum With {
    Nothing,
    /// A sliding window of 128 tokens, in tree mode.
    Window,
    /// KV events, hence page hashes.
    Events,
}

impl With {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Window => "+window",
            Self::Events => "+events",
        }
    }
}

/// A cache and how it is used.
struct Server {
    cache: RadixCache,
    with: With,
    row: Vec<PageId>,
    tail: Vec<PageId>,
}

impl Server {
    fn new(page_size: u32, num_tokens: u32, with: With) -> Outcome<Self> {
        let num_pages = num_tokens.div_ceil(page_size);
        let config = CacheConfig::new(page_size, num_pages);
        let config = match with {
            With::Nothing => config,
            With::Window => {
                // As many as fit the pool, so that windows are evicted with their leaves only.
                let trailing = Retention::Trailing(WINDOW);
                let component = ComponentConfig::new(trailing, page_size, num_pages);
                config.with_component(Component::Window, component)
            }
            With::Events => config.with_events(1000),
        };
        Ok(Self {
            cache: RadixCache::new(config)?,
            with,
            row: Vec::new(),
            tail: Vec::new(),
        })
    }

    /// Matches a prompt, evicts if needed, and inserts its whole pages from the matched node on.
    ///
    /// `insert` counts everything but the match: lock, page allocation, insert, unlock.
    fn turn(&mut self, tokens: &[u32]) -> Outcome<Turn> {
        let namespace = Namespace::default();
        let cache = &mut self.cache;
        let page_size = cache.config().page_size;
        let num_pages = u32::try_from(tokens.len())? / page_size;
        let start = Instant::now();
        let mut found = cache.match_prefix(&namespace, tokens);
        let matched = Instant::now();
        let receipt = cache.lock(found.node)?;
        let wanted = num_pages - found.cached_len / page_size;
        let locked = Instant::now();
        if wanted > cache.num_free() {
            cache.evict(wanted - cache.num_free());
        }
        let evicted = Instant::now();
        if !cache.allocate(wanted, &mut found.pages) {
            return Err("the cache is too small for this workload".into());
        }
        self.row = found.pages;
        let mut from = found.node;
        if self.with == With::Window && found.full_len > found.cached_len {
            // Others left the prompt here: a window at this place lets the next one hit it.
            from = self.insert(from, &tokens[..found.full_len as usize])?;
        }
        self.insert(from, &tokens[..(num_pages * page_size) as usize])?;
        self.cache.unlock(receipt);
        if self.with == With::Events {
            self.cache.take_events(0);
        }
        let end = Instant::now();
        Ok(Turn {
            num_tokens: u32::try_from(tokens.len())?,
            num_cached: found.cached_len,
            find: matched - start,
            evict: evicted - locked,
            insert: (locked - matched) + (end - evicted),
        })
    }

    /// Inserts a prompt that begins with the prefix `from`, its window too in tree mode.
    fn insert(&mut self, from: NodeHandle, tokens: &[u32]) -> Outcome<NodeHandle> {
        let cache = &mut self.cache;
        let page_size = cache.config().page_size;
        let num_pages = tokens.len() / page_size as usize;
        let mut options = InsertOptions::default().with_from(from);
        let mut tails = [TailPages {
            component: Component::Window,
            pages: &[],
        }];
        if self.with == With::Window {
            self.tail.clear();
            let count = WINDOW.div_ceil(page_size).min(u32::try_from(num_pages)?);
            if !cache.allocate_component(Component::Window, count, &mut self.tail)? {
                cache.evict_component(Component::Window, count)?;
                if !cache.allocate_component(Component::Window, count, &mut self.tail)? {
                    return Err("too few window pages".into());
                }
            }
            tails[0].pages = &self.tail;
            options = options.with_tails(&tails);
        }
        let row = &mut self.row;
        let inserted =
            cache.insert_with(&Namespace::default(), tokens, &row[..num_pages], options)?;
        for replaced in &inserted.replaced {
            row[replaced.page_index as usize] = replaced.tree;
            cache.free(&[replaced.own]);
        }
        for tail in &inserted.tails {
            for replaced in &tail.replaced {
                cache.free_component(Component::Window, &[replaced.own])?;
            }
        }
        Ok(inserted.node)
    }
}

/// Eight conversations with one system prompt grow by 4096 tokens a turn to 128K.
fn chat(page_size: u32, with: With) -> Outcome<Vec<Turn>> {
    let mut random = Random(1);
    let system = random.tokens(4096);
    let conversations: Vec<Vec<u32>> = (0..8)
        .map(|_| [system.clone(), random.tokens(126_976)].concat())
        .collect();
    let mut turns = Vec::new();
    let mut server = Server::new(page_size, 1 << 20, with)?;
    for end in (8192..=131_072).step_by(4096) {
        for conversation in &conversations {
            turns.push(server.turn(&conversation[..end])?);
        }
    }
    server.cache.check_invariants()?;
    Ok(turns)
}

/// 10,000 prompts of one of 32 system prompts (Zipf) and 512 own tokens.
fn sysmix(page_size: u32, with: With) -> Outcome<Vec<Turn>> {
    let mut random = Random(2);
    let systems: Vec<Vec<u32>> = (0..32).map(|_| random.tokens(2048)).collect();
    // Weight 1/rank in units of 1/5040; 32 ranks sum to 20,451.
    let weights: Vec<u32> = (1..=32).map(|rank| 5040 / rank).collect();
    let mut server = Server::new(page_size, 6 << 20, with)?;
    let mut turns = Vec::new();
    for _ in 0..10_000 {
        let mut draw = random.below(weights.iter().sum());
        let mut rank = 0;
        while draw >= weights[rank] {
            draw -= weights[rank];
            rank += 1;
        }
        let prompt = [systems[rank].clone(), random.tokens(512)].concat();
        turns.push(server.turn(&prompt)?);
    }
    server.cache.check_invariants()?;
    Ok(turns)
}

/// A full cache of unrelated 512-token leaves; each new one takes the place of the oldest.
fn evict(page_size: u32, num_leaves: u32, with: With) -> Outcome<Vec<Turn>> {
    let mut random = Random(3);
    let mut server = Server::new(page_size, num_leaves * 512, with)?;
    for _ in 0..num_leaves {
        server.turn(&random.tokens(512))?;
    }
    let mut turns = Vec::new();
    for _ in 0..20_000 {
        turns.push(server.turn(&random.tokens(512))?);
    }
    server.cache.check_invariants()?;
    Ok(turns)
}

fn evictions(page_size: u32, with: With) -> Outcome<()> {
    for num_leaves in [1024, 8192, 65_536] {
        let workload = format!("evict/{num_leaves}leaves");
        report(&workload, page_size, with, |page_size, with| {
            evict(page_size, num_leaves, with)
        })?;
    }
    Ok(())
}

/// Resident memory a token of 4096 unique prompts of 512 tokens, the server's own buffers aside.
fn memory(page_size: u32, with: With) -> Outcome<()> {
    let mut random = Random(4);
    let mut server = Server::new(page_size, 1 << 21, with)?;
    let mut tokens = random.tokens(512);
    server.turn(&tokens)?;
    let before = resident_bytes()?;
    for _ in 1..4096 {
        for token in &mut tokens {
            *token = random.below(129_280);
        }
        server.turn(&tokens)?;
    }
    let used = resident_bytes()?.saturating_sub(before);
    let cached = u64::from(server.cache.num_evictable()) * u64::from(page_size);
    server.cache.check_invariants()?;
    #[expect(clippy::cast_precision_loss, reason = "a figure to print")]
    let bytes = used as f64 / cached as f64;
    writeln!(
        std::io::stdout(),
        "{{\"workload\":\"memory{}\",\"page_size\":{page_size},\"tokens\":{cached},\"bytes_token\":{bytes:.2}}}",
        with.name(),
    )?;
    Ok(())
}

/// Chained hashes of one 128K prompt.
fn hash(page_size: u32) -> Outcome<()> {
    let tokens = Random(5).tokens(131_072);
    let times = (0..40).map(|_| {
        let start = Instant::now();
        std::hint::black_box(page_hashes(&Namespace::default(), &tokens, page_size));
        start.elapsed()
    });
    let best = times.min().unwrap_or_default().as_secs_f64();
    writeln!(
        std::io::stdout(),
        "{{\"workload\":\"hash/128K\",\"page_size\":{page_size},\"ns_token\":{:.2}}}",
        best * 1e9 / 131_072.0
    )?;
    Ok(())
}

/// Resident memory of this process; needs Linux.
fn resident_bytes() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(kilobytes.ok_or("no VmRSS")?.parse::<u64>()? * 1024)
}

/// Arguments: a workload, a page size and a variant (`""`, `+window`, `+events`), or page sizes
/// (default 64, 256) for all but `memory`.
fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let all = [With::Nothing, With::Window, With::Events];
    if let [what, page_size, variant] = &arguments[..] {
        let with = all.into_iter().find(|with| with.name() == variant);
        return match (what.as_str(), with) {
            ("memory", Some(with)) => memory(page_size.parse()?, with),
            ("evict", Some(with)) => evictions(page_size.parse()?, with),
            ("chat", Some(with)) => report("chat/128K", page_size.parse()?, with, chat),
            ("sysmix", Some(with)) => report("sysmix/10000", page_size.parse()?, with, sysmix),
            _ => Err(
                "usage: workloads [memory|evict|chat|sysmix PAGE_SIZE VARIANT | PAGE_SIZE..]"
                    .into(),
            ),
        };
    }
    let mut page_sizes = Vec::new();
    for argument in &arguments {
        page_sizes.push(argument.parse()?);
    }
    if page_sizes.is_empty() {
        page_sizes = vec![64, 256];
    }
    for page_size in page_sizes {
        hash(page_size)?;
        for with in all {
            report("chat/128K", page_size, with, chat)?;
            report("sysmix/10000", page_size, with, sysmix)?;
            evictions(page_size, with)?;
        }
    }
    Ok(())
}
