//! Pieces that are a token as a whole, which most are: one look at one place.

use super::hash::{low_half, mix};
use super::merges::Merges;
use super::word_key::key;
use std::ops::Range;

/// Longer tokens are not here.
pub(crate) const MAX_BYTES: usize = 12;
/// Tokens have less than 24 bits.
const TOKEN: u64 = 0x00FF_FFFF_0000_0000;
const FREE: [u64; 2] = [0; 2];

/// Tokens by their bytes: open addressing, at most half full.
pub(crate) struct WholeTokens {
    /// A key, and the token where the key has zeros.
    slots: Vec<[u64; 2]>,
}

/// A piece, and where to look for its token.
#[derive(Clone, Copy)]
pub(crate) struct Whole {
    key: [u64; 2],
    slot: usize,
}

impl WholeTokens {
    /// Of those among `tokens`, numbers of less than 24 bits, that are short enough.
    pub(crate) fn of(merges: &Merges, tokens: &[u32]) -> Self {
        let mut table = Self {
            slots: vec![FREE; (tokens.len() * 2).next_power_of_two()],
        };
        for &token in tokens {
            let bytes = merges.bytes(token);
            let Whole { key, mut slot } = table.whole(bytes, &(0..bytes.len()));
            if key != FREE {
                while table.slots[slot] != FREE {
                    slot = table.next(slot);
                }
                table.slots[slot] = [key[0], key[1] | u64::from(token) << TOKEN.trailing_zeros()];
            }
        }
        table
    }

    /// Begins to ask for a piece of the text: [`Self::look`], then [`Self::answer`], which is none for one that is
    /// too long.
    pub(crate) fn whole(&self, text: &[u8], piece: &Range<usize>) -> Whole {
        if piece.len() > MAX_BYTES {
            return Whole { key: FREE, slot: 0 };
        }
        let key = key(text, piece);
        let slot = low_half(mix(key[0] ^ mix(key[1]))) as usize & (self.slots.len() - 1);
        Whole { key, slot }
    }

    /// Reads from memory, and decides nothing: looks for several pieces wait for memory together.
    pub(crate) fn look(&self, whole: Whole) -> [u64; 2] {
        self.slots[whole.slot]
    }

    /// The token by what was found.
    pub(crate) fn answer(&self, whole: Whole, mut found: [u64; 2]) -> Option<u32> {
        let mut slot = whole.slot;
        while found != FREE {
            if found[0] == whole.key[0] && found[1] & !TOKEN == whole.key[1] {
                return Some(low_half((found[1] & TOKEN) >> TOKEN.trailing_zeros()));
            }
            slot = self.next(slot);
            found = self.slots[slot];
        }
        None
    }

    fn next(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }
}
