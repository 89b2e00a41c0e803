//! A server that tells of every prompt how much of it was cached, on this crate alone.
//!
//! `cargo run -p dsserve-radix-cache --example toy_server -- 127.0.0.1:7878`, then send lines to that
//! address, with `nc` say: `TENANT: PROMPT`, or a prompt alone. Prompts of a tenant share prefixes with each
//! other and with nobody else. `--demo` runs a few prompts and ends.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use dsserve_radix_cache::{CacheConfig, Namespace, RadixCache};

/// Small pages and few of them, so that hits and evictions show.
const PAGE_SIZE: u32 = 8;
const NUM_PAGES: u32 = 64;

/// The cache and the pages that it only keeps the numbers of.
struct Engine {
    cache: RadixCache,
    /// Stands for the KV of a model: what each position of each page was computed from.
    pages: Vec<[u8; PAGE_SIZE as usize]>,
}

/// What became of a prompt.
struct Answer {
    cached: u32,
    computed: u32,
    evicted: u32,
}

impl Engine {
    fn new() -> Result<Self, Box<dyn Error>> {
        Ok(Self {
            cache: RadixCache::new(CacheConfig::new(PAGE_SIZE, NUM_PAGES))?,
            pages: vec![[0; PAGE_SIZE as usize]; NUM_PAGES as usize + 1],
        })
    }

    /// Computes what is not cached of a prompt, whose tokens are its bytes.
    fn run(&mut self, namespace: &Namespace, prompt: &str) -> Result<Answer, Box<dyn Error>> {
        let tokens: Vec<u32> = prompt.bytes().map(u32::from).collect();
        let num_tokens = u32::try_from(tokens.len())?;
        // The last token is always computed: a model needs its logits.
        let known = tokens.len().saturating_sub(1);
        let found = self.cache.match_prefix(namespace, &tokens[..known]);
        let receipt = self.cache.lock(found.node)?;
        let mut row = found.pages;
        let wanted = num_tokens.div_ceil(PAGE_SIZE) - found.cached_len / PAGE_SIZE;
        let missing = wanted.saturating_sub(self.cache.num_free());
        let evicted = self.cache.evict(missing);
        if !self.cache.allocate(wanted, &mut row) {
            self.cache.unlock(receipt);
            return Err(format!("{num_tokens} tokens do not fit {NUM_PAGES} pages").into());
        }
        let page_size = PAGE_SIZE as usize;
        for (position, byte) in prompt.bytes().enumerate().skip(found.cached_len as usize) {
            let page = row[position / page_size] as usize;
            self.pages[page][position % page_size] = byte;
        }
        self.check(&row, prompt)?;
        let num_whole = tokens.len() / page_size;
        let whole = &tokens[..num_whole * page_size];
        let inserted = self
            .cache
            .insert_at(namespace, found.node, whole, &row[..num_whole])?;
        for replaced in inserted.replaced {
            self.cache.free(&[replaced.own]);
        }
        self.cache.unlock(receipt);
        self.cache.free(&row[num_whole..]); // the last page is not full
        Ok(Answer {
            cached: found.cached_len,
            computed: num_tokens - found.cached_len,
            evicted,
        })
    }

    /// A model that reads its pages must find the whole prompt there.
    fn check(&self, row: &[u32], prompt: &str) -> Result<(), Box<dyn Error>> {
        let pages = row.iter().map(|&page| self.pages[page as usize]);
        let read: Vec<u8> = pages.flatten().take(prompt.len()).collect();
        if read == prompt.as_bytes() {
            Ok(())
        } else {
            Err("the pages hold another prompt".into())
        }
    }
}

/// Answers one line.
fn answer(engine: &mut Engine, line: &str) -> String {
    let (tenant, prompt) = match line.split_once(": ") {
        Some((tenant, prompt)) => (Some(tenant.to_owned()), prompt),
        None => (None, line),
    };
    let namespace = Namespace {
        cache_salt: tenant,
        ..Namespace::default()
    };
    match engine.run(&namespace, prompt) {
        Ok(answer) => format!(
            "{} tokens cached, {} computed, {} pages evicted",
            answer.cached, answer.computed, answer.evicted
        ),
        Err(error) => format!("error: {error}"),
    }
}

fn serve(address: &str) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(address)?;
    let mut engine = Engine::new()?;
    for connection in listener.incoming() {
        let connection: TcpStream = connection?;
        let mut out = connection.try_clone()?;
        for line in BufReader::new(connection).lines() {
            writeln!(out, "{}", answer(&mut engine, &line?))?;
        }
    }
    Ok(())
}

fn demo(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut engine = Engine::new()?;
    let system = "You are a helpful server of few words.";
    for line in [
        format!("ada: {system} What is a page?"),
        format!("ada: {system} What is a prefix?"),
        format!("bob: {system} What is a page?"),
        format!("ada: {}", "x".repeat(400)),
        format!("ada: {}", "x".repeat(1_000)),
        String::new(),
    ] {
        writeln!(out, "{}", answer(&mut engine, &line))?;
    }
    engine.cache.check_invariants()?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("--demo") => demo(&mut std::io::stdout()),
        Some(address) => serve(address),
        None => Err("usage: toy_server ADDRESS | --demo".into()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_demo_shows_hits_tenants_evictions_and_refusals() {
        let mut out = Vec::new();
        super::demo(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let expected = "\
            0 tokens cached, 54 computed, 0 pages evicted\n\
            48 tokens cached, 8 computed, 0 pages evicted\n\
            0 tokens cached, 54 computed, 0 pages evicted\n";
        assert!(text.starts_with(expected), "{text}");
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[3].starts_with("0 tokens cached, 400 computed"));
        assert_eq!(lines[4], "error: 1000 tokens do not fit 64 pages");
        assert_eq!(lines.len(), 6);
    }
}
