//! Short pieces to tokens: the merge rules applied as they are written, the first one first.
//!
//! Quadratic in the length of a piece, so for short ones only. Each merge needs two look-ups before the
//! next one is known, and in a new text most of them miss the nearer caches. So several pieces go on
//! together, one merge each, and their look-ups wait for memory at the same time.

use super::merges::Merges;
use super::pairs::{Pair, NO_TOKEN};

/// Longer pieces are not encoded here.
pub(crate) const MAX_BYTES: usize = 64;
const NUM_LANES: usize = 16;

/// Memory that is used again for the next pieces.
#[derive(Default)]
pub(crate) struct Lanes {
    all: Vec<Lane>,
    /// Those in use.
    busy: Vec<usize>,
    asked: Vec<Asked>,
    found: Vec<u64>,
}

/// A piece on its way.
struct Lane {
    /// Of the piece.
    index: usize,
    len: usize,
    tokens: [u32; MAX_BYTES],
    /// What a token and the next one make.
    made: [u32; MAX_BYTES],
}

/// What the token at `at` of a lane and the next one make is to be found.
struct Asked {
    lane: usize,
    at: usize,
    pair: Pair,
}

impl Lanes {
    /// Encodes pieces of 1 to [`MAX_BYTES`] bytes; calls `give` with the index and the tokens of each, in
    /// any order.
    pub(crate) fn encode<'a>(
        &mut self,
        merges: &Merges,
        pieces: impl IntoIterator<Item = (usize, &'a [u8])>,
        mut give: impl FnMut(usize, &[u32]),
    ) {
        self.all.resize_with(NUM_LANES, Lane::default);
        let mut pieces = pieces.into_iter();
        self.busy.clear();
        for (lane, (index, piece)) in pieces.by_ref().take(NUM_LANES).enumerate() {
            self.all[lane].start(merges, index, piece);
            self.busy.push(lane);
        }
        while !self.busy.is_empty() {
            self.asked.clear();
            let mut turn = 0;
            while let Some(&number) = self.busy.get(turn) {
                let lane = &mut self.all[number];
                if let Some(at) = lane.merge() {
                    let places = at.saturating_sub(1)..(at + 1).min(lane.len - 1);
                    self.asked.extend(places.map(|at| Asked {
                        lane: number,
                        at,
                        pair: merges.pairs().pair(lane.tokens[at], lane.tokens[at + 1]),
                    }));
                    turn += 1;
                    continue;
                }
                give(lane.index, &lane.tokens[..lane.len]);
                if let Some((index, piece)) = pieces.next() {
                    lane.start(merges, index, piece);
                } else {
                    self.busy.swap_remove(turn);
                }
            }
            let look = |asked: &Asked| merges.pairs().look(asked.pair);
            self.found.clear();
            self.found.extend(self.asked.iter().map(look));
            for (asked, &found) in self.asked.iter().zip(&self.found) {
                let made = merges.pairs().answer(asked.pair, found);
                self.all[asked.lane].made[asked.at] = made;
            }
        }
    }
}

impl Lane {
    fn start(&mut self, merges: &Merges, index: usize, piece: &[u8]) {
        self.index = index;
        self.len = piece.len();
        for (token, &byte) in self.tokens.iter_mut().zip(piece) {
            *token = u32::from(byte);
        }
        for (made, pair) in self.made.iter_mut().zip(piece.windows(2)) {
            *made = merges.pairs().of_bytes(pair[0], pair[1]);
        }
    }

    /// Applies the first rule of those that apply, leftmost; returns where the new token is. What that
    /// makes with its neighbours is not known yet.
    fn merge(&mut self) -> Option<usize> {
        let (mut at, mut first) = (0, NO_TOKEN);
        for (index, &token) in self.made[..self.len - 1].iter().enumerate() {
            if token < first {
                (at, first) = (index, token);
            }
        }
        if first == NO_TOKEN {
            return None;
        }
        self.len -= 1;
        self.tokens[at] = first;
        for index in at + 1..self.len {
            self.tokens[index] = self.tokens[index + 1];
            self.made[index - 1] = self.made[index];
        }
        Some(at)
    }
}

impl Default for Lane {
    fn default() -> Self {
        Self {
            index: 0,
            len: 1,
            tokens: [0; MAX_BYTES],
            made: [NO_TOKEN; MAX_BYTES],
        }
    }
}
