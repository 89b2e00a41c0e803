//! One piece of text to tokens: byte-pair encoding from left to right.
//!
//! A row of tokens is the encoding of its text exactly if every two neighbours are the encoding of
//! theirs. So the encoder takes the longest token that may follow, and goes back where none may. A
//! place it had to leave is never entered again: the encoding of the text up to there is unique, so
//! no other way leads through it. The work is linear in the text, whatever the text is.

use super::merges::Merges;
use super::seams::{Seam, Seams};
use super::trie::Trie;

/// Encodes pieces; needs one bit of memory a byte besides the ids.
pub(crate) struct Bpe {
    merges: Merges,
    trie: Trie,
    seams: Seams,
}

/// A token that the text goes on with, and its length.
type Candidate = (u32, usize);

/// Memory that is used again for the next piece.
#[derive(Default)]
pub(crate) struct Scratch {
    /// One bit for each place of the piece: no way on from here.
    dead: Vec<u64>,
}

impl Bpe {
    /// # Errors
    /// That the vocabulary is too large.
    pub(crate) fn new(merges: Merges) -> Result<Self, String> {
        Ok(Self {
            trie: Trie::build(&merges)?,
            seams: Seams::of(&merges),
            merges,
        })
    }

    /// Appends the ids of `piece` to `out`.
    pub(crate) fn encode(&self, piece: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
        if piece.is_empty() {
            return;
        }
        let first = out.len();
        let (longest, len) = self.trie.longest(piece);
        if len == piece.len() {
            out.push(self.merges.id(longest));
            return;
        }
        scratch.dead.clear();
        scratch.dead.resize(piece.len() / 64 + 1, 0);
        self.walk(piece, (longest, len), &mut scratch.dead, first, out);
        for token in &mut out[first..] {
            *token = self.merges.id(*token);
        }
    }

    /// Appends the tokens of `piece`, by rank.
    fn walk(
        &self,
        piece: &[u8],
        longest: Candidate,
        dead: &mut [u64],
        first: usize,
        out: &mut Vec<u32>,
    ) {
        let mut at = 0;
        let mut candidate = Some(longest);
        while at < piece.len() {
            let last = out[first..].last().copied();
            let last = last.map(|last| (last, self.seams.at(piece, at)));
            if let Some((token, len)) = self.fitting(candidate, last, at, dead) {
                out.push(token);
                at += len;
                if at < piece.len() {
                    candidate = Some(self.trie.longest(&piece[at..]));
                }
            } else {
                let last = out.pop().expect("the empty text has an encoding");
                dead[at / 64] |= 1 << (at % 64);
                at -= self.merges.token_len(last);
                candidate = self.shorter(last);
            }
        }
    }

    /// The longest of `candidate` and the shorter ones that may follow `last` at `at`.
    fn fitting(
        &self,
        mut candidate: Option<Candidate>,
        last: Option<(u32, Seam)>,
        at: usize,
        dead: &[u64],
    ) -> Option<Candidate> {
        while let Some((token, len)) = candidate {
            let end = at + len;
            let is_dead = dead[end / 64] >> (end % 64) & 1 == 1;
            let may_follow = |(last, seam)| self.merges.may_follow(last, token, seam);
            if !is_dead && last.is_none_or(may_follow) {
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
