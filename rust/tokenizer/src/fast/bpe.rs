//! One piece of text to tokens: byte-pair encoding from left to right.
//!
//! A row of tokens is the encoding of its text exactly if every two neighbours are the encoding of
//! theirs. So the encoder takes the longest token that may follow, and goes back where none may. A
//! place it had to leave is never entered again: the encoding of the text up to there is unique, so
//! no other way leads through it. The work is linear in the text, whatever the text is.

use super::merges::Merges;
use super::trie::Trie;

/// Encodes pieces; needs one bit of memory a byte besides the ids.
pub(crate) struct Bpe {
    merges: Merges,
    trie: Trie,
}

/// Memory that is used again for the next piece.
#[derive(Default)]
pub(crate) struct Scratch {
    /// One bit for each place of the piece: no way on from here.
    dead: Vec<u64>,
}

impl Bpe {
    pub(crate) fn new(merges: Merges) -> Self {
        Self {
            trie: Trie::build(&merges),
            merges,
        }
    }

    /// Appends the ids of `piece` to `out`.
    pub(crate) fn encode(&self, piece: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
        if piece.is_empty() {
            return;
        }
        let first = out.len();
        let longest = self.trie.longest(piece);
        if self.merges.bytes(longest).len() == piece.len() {
            out.push(self.merges.id(longest));
            return;
        }
        scratch.dead.clear();
        scratch.dead.resize(piece.len() / 64 + 1, 0);
        self.walk(piece, longest, &mut scratch.dead, first, out);
        for token in &mut out[first..] {
            *token = self.merges.id(*token);
        }
    }

    /// Appends the tokens of `piece`, by rank.
    fn walk(&self, piece: &[u8], longest: u32, dead: &mut [u64], first: usize, out: &mut Vec<u32>) {
        let mut at = 0;
        let mut candidate = Some(longest);
        while at < piece.len() {
            let last = out[first..].last().copied();
            let fitting = self.fitting(candidate, last, at, dead);
            if let Some(token) = fitting {
                out.push(token);
                at += self.merges.bytes(token).len();
                if at < piece.len() {
                    candidate = Some(self.trie.longest(&piece[at..]));
                }
            } else {
                let last = out.pop().expect("the empty text has an encoding");
                dead[at / 64] |= 1 << (at % 64);
                at -= self.merges.bytes(last).len();
                candidate = self.trie.shorter(last);
            }
        }
    }

    /// The longest of `candidate` and the shorter ones that may follow `last` at `at`.
    fn fitting(
        &self,
        mut candidate: Option<u32>,
        last: Option<u32>,
        at: usize,
        dead: &[u64],
    ) -> Option<u32> {
        while let Some(token) = candidate {
            let end = at + self.merges.bytes(token).len();
            let is_dead = dead[end / 64] >> (end % 64) & 1 == 1;
            if !is_dead && last.is_none_or(|last| self.merges.may_follow(last, token)) {
                return Some(token);
            }
            candidate = self.trie.shorter(token);
        }
        None
    }
}
