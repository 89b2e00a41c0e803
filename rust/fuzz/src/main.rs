//! `smoke`: the fuzz targets on a stable compiler, without coverage.
//!
//! `cargo run --release --bin smoke -- [--seconds N] [--seed S] [TARGET ...]` mutates the inputs of
//! `corpus/TARGET` for N seconds each and keeps an input that fails in `found/TARGET`.

use dsserve_fuzz::{Target, TARGETS};
use std::error::Error;
use std::fs;
use std::io::Write;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const MAX_INPUT_BYTES: usize = 2_048;

fn main() -> Result<(), Box<dyn Error>> {
    let mut seconds = 10;
    let mut seed = 1;
    let mut names = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || {
            arguments
                .next()
                .ok_or("a number is missing")?
                .parse::<u64>()
                .map_err(Box::<dyn Error>::from)
        };
        match argument.as_str() {
            "--seconds" => seconds = number()?,
            "--seed" => seed = number()?,
            _ => names.push(argument),
        }
    }
    let unknown = names
        .iter()
        .find(|name| TARGETS.iter().all(|(known, _)| known != name));
    if let Some(name) = unknown {
        return Err(format!(
            "no target {name}; there are {:?}",
            TARGETS.map(|(name, _)| name)
        )
        .into());
    }
    let chosen = TARGETS
        .iter()
        .filter(|(name, _)| names.is_empty() || names.iter().any(|n| n == name));
    let mut is_clean = true;
    for target in chosen {
        is_clean &= mutate(target, Duration::from_secs(seconds), seed)?;
    }
    if is_clean {
        Ok(())
    } else {
        Err("some inputs fail".into())
    }
}

/// Runs one target; returns whether nothing failed.
fn mutate((name, run): &Target, time: Duration, seed: u64) -> Result<bool, Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut inputs = read_corpus(&root.join("corpus").join(name))?;
    let mut random = Random(seed.max(1));
    let started = Instant::now();
    let mut num_runs = 0u64;
    while started.elapsed() < time {
        let index = random.below(inputs.len());
        let input = mutated(&inputs[index], &inputs, &mut random);
        num_runs += 1;
        if catch_unwind(AssertUnwindSafe(|| run(&input))).is_err() {
            let file = keep(&root.join("found").join(name), &input)?;
            writeln!(
                std::io::stdout(),
                "{name}: FAILED after {num_runs} runs: {}",
                file.display()
            )?;
            return Ok(false);
        }
        // Without coverage there is no telling which inputs are new: keep a few at random.
        if random.below(50) == 0 && inputs.len() < 2_000 {
            inputs.push(input);
        }
    }
    writeln!(std::io::stdout(), "{name}: {num_runs} runs, clean")?;
    Ok(true)
}

fn read_corpus(folder: &Path) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let mut inputs = vec![Vec::new()];
    for entry in fs::read_dir(folder)? {
        inputs.push(fs::read(entry?.path())?);
    }
    Ok(inputs)
}

fn keep(folder: &Path, input: &[u8]) -> Result<PathBuf, Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    let hash = input.iter().fold(0xCBF2_9CE4_8422_2325u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    let file = folder.join(format!("{hash:016x}"));
    fs::write(&file, input)?;
    Ok(file)
}

fn mutated(input: &[u8], inputs: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut input = input.to_vec();
    for _ in 0..=random.below(6) {
        let at = random.below(input.len() + 1);
        match random.below(5) {
            0 if !input.is_empty() => {
                let at = at.min(input.len() - 1);
                input[at] = random.byte();
            }
            1 => input.insert(at, random.byte()),
            2 => {
                input.truncate(at);
            }
            3 => {
                let other = &inputs[random.below(inputs.len())];
                let from = random.below(other.len() + 1);
                let tail = input.split_off(at);
                input.extend_from_slice(&other[from..]);
                input.extend(tail);
            }
            _ => input.extend((0..random.below(24)).map(|_| random.byte())),
        }
    }
    input.truncate(MAX_INPUT_BYTES);
    input
}

/// xorshift64*
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next()).unwrap_or(0) % end
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}
