//! Can any merge reach over this place of a text? A quick no for most places between characters.
//!
//! Whether two tokens may stand side by side takes a dozen look-ups far apart in memory. Between two
//! characters above ASCII, however, few of all possible neighbours occur in any merge. So the bytes
//! next to the seam of every such merge are kept in a filter that fits the nearest caches.

use super::hash::mix;
use super::merges::{Merges, NUM_BYTES};

/// How many bytes on either side are looked at.
const REACH: usize = 3;
const BITS_PER_MERGE: usize = 16;

/// The seams of all merges between two characters above ASCII.
pub(crate) struct Seams {
    filter: Vec<u64>,
    /// The numbers of bytes on either side that seams have; [`REACH`] stands for more, too.
    widths: Vec<(usize, usize)>,
}

impl Seams {
    pub(crate) fn of(merges: &Merges) -> Self {
        let mut seams = Vec::new();
        let mut widths = Vec::new();
        for token in NUM_BYTES..merges.len() {
            let (left, right) = merges.halves(token);
            let (left, right) = (merges.bytes(left), merges.bytes(right));
            if !is_between(left[left.len() - 1], right[0]) {
                continue;
            }
            let (before, after) = (left.len().min(REACH), right.len().min(REACH));
            if !widths.contains(&(before, after)) {
                widths.push((before, after));
            }
            seams.push(hash(&left[left.len() - before..], &right[..after]));
        }
        let num_words = (seams.len() * BITS_PER_MERGE / 64).next_power_of_two();
        let mut filter = vec![0; num_words];
        for seam in seams {
            let (word, bit) = place(seam, num_words);
            filter[word] |= bit;
        }
        Self { filter, widths }
    }

    /// Whether surely no merge joins bytes before `at` with bytes from `at` on.
    pub(crate) fn is_clear(&self, text: &[u8], at: usize) -> bool {
        if at < REACH || text.len() < at + REACH || !is_between(text[at - 1], text[at]) {
            return false;
        }
        self.widths.iter().all(|&(before, after)| {
            let seam = hash(&text[at - before..at], &text[at..at + after]);
            let (word, bit) = place(seam, self.filter.len());
            self.filter[word] & bit == 0
        })
    }
}

/// Whether a character above ASCII ends and another one begins.
fn is_between(last: u8, first: u8) -> bool {
    last >= 0x80 && first >= 0xC0
}

/// At most six bytes in one number; the widths are told apart, too.
fn hash(before: &[u8], after: &[u8]) -> u64 {
    let join = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
    let value = before.iter().chain(after).fold(before.len() as u64, join);
    mix(value)
}

fn place(hash: u64, num_words: usize) -> (usize, u64) {
    ((hash >> 6) as usize & (num_words - 1), 1 << (hash % 64))
}
