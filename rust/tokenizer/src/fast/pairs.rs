//! What two tokens are merged into.

use super::hash::{low_half, mix};

const TOKEN_BITS: u32 = 21;
/// Tokens have smaller numbers: two of them, and what they make, fit 64 bits.
pub(crate) const MAX_TOKENS: u32 = (1 << TOKEN_BITS) - 1;
/// Comes after every token.
pub(crate) const NO_TOKEN: u32 = u32::MAX;
/// An entry that belongs here is further on. Set where a pair looks first, whatever else is there.
const GOES_ON: u64 = 1 << 63;
/// No pair: there is no token of this number.
const FREE: u64 = GOES_ON - 1;

/// (left, right) to what their merge makes: open addressing, at most half full.
pub(crate) struct PairTable {
    /// Left, right and made in one number, so that a look touches one place.
    slots: Vec<u64>,
    /// The same for two bytes, by these.
    bytes: Vec<u32>,
}

/// Two tokens, and where to look for what they make.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    key: u64,
    slot: usize,
}

impl PairTable {
    pub(crate) fn with_capacity(len: usize) -> Self {
        Self {
            slots: vec![FREE; (len * 2).next_power_of_two().max(2)],
            bytes: vec![NO_TOKEN; 1 << 16],
        }
    }

    /// Adds a pair that is not there; all three are below [`MAX_TOKENS`].
    pub(crate) fn insert(&mut self, left: u32, right: u32, made: u32) {
        if let (Ok(left), Ok(right)) = (u8::try_from(left), u8::try_from(right)) {
            self.bytes[two_bytes(left, right)] = made;
        }
        let Pair { key, mut slot } = self.pair(left, right);
        if self.slots[slot] != FREE {
            self.slots[slot] |= GOES_ON;
        }
        while self.slots[slot] & !GOES_ON != FREE {
            slot = self.next(slot);
        }
        self.slots[slot] = key << TOKEN_BITS | u64::from(made);
    }

    /// What two tokens make, or [`NO_TOKEN`].
    pub(crate) fn get(&self, left: u32, right: u32) -> u32 {
        let pair = self.pair(left, right);
        self.answer(pair, self.look(pair))
    }

    /// Begins to ask for two tokens: [`Self::look`], then [`Self::answer`].
    pub(crate) fn pair(&self, left: u32, right: u32) -> Pair {
        let key = u64::from(left) << TOKEN_BITS | u64::from(right);
        let slot = low_half(mix(key)) as usize & (self.slots.len() - 1);
        Pair { key, slot }
    }

    /// Reads from memory, and decides nothing: looks for several pairs wait for memory together.
    pub(crate) fn look(&self, pair: Pair) -> u64 {
        self.slots[pair.slot]
    }

    /// What the tokens make by what was found, or [`NO_TOKEN`].
    pub(crate) fn answer(&self, pair: Pair, mut found: u64) -> u32 {
        let goes_on = found & GOES_ON != 0;
        let mut slot = pair.slot;
        loop {
            if (found & !GOES_ON) >> TOKEN_BITS == pair.key {
                return low_half(found) & MAX_TOKENS;
            }
            if !goes_on || found & !GOES_ON == FREE {
                return NO_TOKEN;
            }
            slot = self.next(slot);
            found = self.slots[slot];
        }
    }

    /// What two bytes make, or [`NO_TOKEN`].
    pub(crate) fn of_bytes(&self, left: u8, right: u8) -> u32 {
        self.bytes[two_bytes(left, right)]
    }

    fn next(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }
}

fn two_bytes(left: u8, right: u8) -> usize {
    usize::from(left) << 8 | usize::from(right)
}
