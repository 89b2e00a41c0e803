//! Hashes for tables inside the process; not for data that is kept.

use std::hash::{BuildHasher, RandomState};

const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

/// Spreads the bits of a number over all 64.
pub(crate) fn mix(value: u64) -> u64 {
    let product = u128::from(value ^ MULTIPLIER) * u128::from(MULTIPLIER);
    fold(product)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the lower half is what is wanted"
)]
pub(crate) fn low_half(value: u64) -> u32 {
    value as u32
}

/// A hash of words that users choose: which of them collide cannot be told without the key.
#[derive(Clone, Copy)]
pub(crate) struct Key {
    start: u64,
    multiplier: u64,
}

impl Key {
    pub(crate) fn random() -> Self {
        let random = RandomState::new();
        Self {
            start: random.hash_one(0u64),
            multiplier: random.hash_one(1u64) | 1,
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "only the low bits of the hash choose a slot"
    )]
    pub(crate) fn hash(self, words: &[u64]) -> usize {
        let step =
            |state, &word: &u64| fold(u128::from(state ^ word) * u128::from(self.multiplier));
        words.iter().fold(self.start, step) as usize
    }
}

/// The hash of a byte string, eight bytes at a time.
pub(crate) fn hash_bytes(seed: u64, bytes: &[u8]) -> u64 {
    let mut state = seed ^ bytes.len() as u64;
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        let word = u64::from_le_bytes([
            chunk[0], chunk[1], chunk[2], chunk[3], chunk[4], chunk[5], chunk[6], chunk[7],
        ]);
        state = mix(state ^ word);
    }
    let rest = chunks.remainder();
    if rest.is_empty() {
        return state;
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(state ^ u64::from_le_bytes(last))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "both halves of the product are used"
)]
fn fold(product: u128) -> u64 {
    product as u64 ^ (product >> 64) as u64
}
