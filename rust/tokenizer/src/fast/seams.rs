//! Can any merge reach over this place of a text? A quick no for most places between characters.
//!
//! Whether two tokens may stand side by side takes a dozen look-ups far apart in memory. Between two
//! characters above ASCII, however, few of all possible neighbours occur in any merge. So the bytes
//! next to the seam of every such merge are kept in a filter that fits the nearest caches.

use super::hash::mix;
use super::merges::{Merges, NUM_BYTES};

/// How many bytes on either side are looked at.
pub(crate) const REACH: usize = 3;
const BITS_PER_MERGE: usize = 32;
const MIN_FILTER_WORDS: usize = 64;
const NUM_BYTE_PAIRS: usize = 1 << 16;

/// What the bytes around a place say about merges over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seam {
    /// No merge reaches over: any token may follow any other here.
    Clear,
    /// None with a half of less than [`REACH`] bytes does.
    NoShortHalves,
    Unknown,
}

/// The seams of all merges between two characters above ASCII.
pub(crate) struct Seams {
    /// Those of halves of at least [`REACH`] bytes.
    long: Filter,
    /// Those of shorter halves, which are few: a bit for the two bytes at the seam.
    short: Vec<u64>,
}

impl Seams {
    pub(crate) fn of(merges: &Merges) -> Self {
        let mut long = Vec::new();
        let mut short = vec![0; NUM_BYTE_PAIRS / 64];
        for token in NUM_BYTES..merges.len() {
            let (left, right) = merges.halves(token);
            let (left, right) = (merges.bytes(left), merges.bytes(right));
            let (last, first) = (left[left.len() - 1], right[0]);
            if !is_between(last, first) {
                continue;
            }
            if left.len() < REACH || right.len() < REACH {
                let pair = byte_pair(last, first);
                short[pair / 64] |= 1 << (pair % 64);
            } else {
                long.push(hash(&left[left.len() - REACH..], &right[..REACH]));
            }
        }
        Self {
            long: Filter::of(&long),
            short,
        }
    }

    /// What is sure about the place `at` of a text.
    pub(crate) fn at(&self, text: &[u8], at: usize) -> Seam {
        if at < REACH || text.len() < at + REACH || !is_between(text[at - 1], text[at]) {
            return Seam::Unknown;
        }
        let pair = byte_pair(text[at - 1], text[at]);
        if self.short[pair / 64] >> (pair % 64) & 1 == 1 {
            Seam::Unknown
        } else if self
            .long
            .may_have(hash(&text[at - REACH..at], &text[at..at + REACH]))
        {
            Seam::NoShortHalves
        } else {
            Seam::Clear
        }
    }
}

fn byte_pair(last: u8, first: u8) -> usize {
    usize::from(last) << 8 | usize::from(first)
}

/// One bit for each of more hashes than there are members.
struct Filter(Vec<u64>);

impl Filter {
    fn of(hashes: &[u64]) -> Self {
        let num_words = (hashes.len() * BITS_PER_MERGE / 64).max(MIN_FILTER_WORDS);
        let mut filter = Self(vec![0; num_words.next_power_of_two()]);
        for &hash in hashes {
            let (word, bit) = filter.place(hash);
            filter.0[word] |= bit;
        }
        filter
    }

    fn may_have(&self, hash: u64) -> bool {
        let (word, bit) = self.place(hash);
        self.0[word] & bit != 0
    }

    fn place(&self, hash: u64) -> (usize, u64) {
        let word = (hash >> 6) & (self.0.len() as u64 - 1);
        (
            usize::try_from(word).expect("below the length"),
            1 << (hash % 64),
        )
    }
}

/// Whether a character above ASCII ends and another one begins.
fn is_between(last: u8, first: u8) -> bool {
    last >= 0x80 && first >= 0xC0
}

/// At most six bytes in one number.
fn hash(before: &[u8], after: &[u8]) -> u64 {
    let join = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
    mix(before.iter().chain(after).fold(0, join))
}
