//! Long pieces to tokens: byte-pair encoding from left to right.
//!
//! A row of tokens is the encoding of its text exactly if every two neighbours are the encoding of
//! theirs. So the encoder takes the longest token that may follow, and goes back where none may. A
//! place it had to leave is never entered again: the encoding of the text up to there is unique, so
//! no other way leads through it. The work is linear in the text, whatever the text is.

use super::merges::Merges;
use super::seams::{Seam, Seams};
use super::trie::Trie;

/// Encodes a piece; needs one bit of memory a byte besides the tokens.
pub(crate) struct Walk<'a> {
    pub(crate) merges: &'a Merges,
    pub(crate) trie: &'a Trie,
    pub(crate) seams: &'a Seams,
}

/// A token that the text goes on with, and its length.
type Candidate = (u32, usize);

/// Memory that is used again for the next piece.
#[derive(Default)]
pub(crate) struct Scratch {
    tokens: Vec<u32>,
    /// One bit for each place of the piece: no way on from here.
    dead: Vec<u64>,
    /// Answers given lately, whether two tokens may stand side by side.
    answers: Answers,
}

const NUM_ANSWERS: usize = 1 << 12;

/// A pair of tokens and whether the second may follow the first, by hash; a new one replaces the old.
struct Answers(Vec<(u32, u32)>);

impl Default for Answers {
    fn default() -> Self {
        // No token follows itself by this number.
        Self(vec![(u32::MAX, u32::MAX); NUM_ANSWERS])
    }
}

impl Answers {
    fn get(&mut self, left: u32, right: u32, ask: impl FnOnce() -> bool) -> bool {
        let hash = (left ^ right.rotate_left(16)).wrapping_mul(0x9E37_79B1) >> 20;
        let known = &mut self.0[hash as usize % NUM_ANSWERS];
        if known.0 == left && known.1 >> 1 == right {
            return known.1 & 1 == 1;
        }
        let answer = ask();
        *known = (left, right << 1 | u32::from(answer));
        answer
    }
}

impl Scratch {
    /// Gives back memory for more than so many tokens.
    pub(crate) fn shrink(&mut self, num_tokens: usize) {
        self.tokens.shrink_to(num_tokens);
        self.dead.shrink_to(num_tokens);
    }
}

impl Walk<'_> {
    /// The tokens of `piece`.
    pub(crate) fn encode<'a>(&self, piece: &[u8], scratch: &'a mut Scratch) -> &'a [u32] {
        scratch.tokens.clear();
        scratch.dead.clear();
        scratch.dead.resize(piece.len() / 64 + 1, 0);
        let mut at = 0;
        let mut candidate = Some(self.trie.longest(piece));
        while at < piece.len() {
            let last = scratch.tokens.last().copied();
            let last = last.map(|last| (last, self.seams.at(piece, at)));
            if let Some((token, len)) = self.fitting(candidate, last, at, scratch) {
                scratch.tokens.push(token);
                at += len;
                if at < piece.len() {
                    candidate = Some(self.trie.longest(&piece[at..]));
                }
            } else {
                let last = scratch.tokens.pop();
                let last = last.expect("the empty text has an encoding");
                scratch.dead[at / 64] |= 1 << (at % 64);
                at -= self.merges.token_len(last);
                candidate = self.shorter(last);
            }
        }
        &scratch.tokens
    }

    /// The longest of `candidate` and the shorter ones that may follow `last` at `at`.
    fn fitting(
        &self,
        mut candidate: Option<Candidate>,
        last: Option<(u32, Seam)>,
        at: usize,
        scratch: &mut Scratch,
    ) -> Option<Candidate> {
        while let Some((token, len)) = candidate {
            let end = at + len;
            let is_dead = scratch.dead[end / 64] >> (end % 64) & 1 == 1;
            let may_follow = match last {
                _ if is_dead => false,
                None | Some((_, Seam::Clear)) => true,
                Some((last, seam)) => scratch
                    .answers
                    .get(last, token, || self.merges.may_follow(last, token, seam)),
            };
            if may_follow {
                return candidate;
            }
            candidate = self.shorter(token);
        }
        None
    }

    fn shorter(&self, token: u32) -> Option<Candidate> {
        let shorter = self.trie.shorter(token)?;
        Some((shorter, self.merges.token_len(shorter)))
    }
}
