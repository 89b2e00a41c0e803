//! Pieces of text to ids, in one of three ways: as a token as a whole, by merging, if the piece is short, or by
//! walking along it.

use super::long::{self, Walk};
use super::merges::Merges;
use super::seams::{Seam, Seams, REACH};
use super::short::{self, Lanes};
use super::trie::Trie;
use super::whole::{Whole, WholeTokens};
use std::ops::Range;

/// Characters of three bytes begin with this one or a greater one.
const LEAD_OF_THREE: u8 = 0xE0;

/// Encodes pieces.
pub(crate) struct Bpe {
    merges: Merges,
    whole: WholeTokens,
    trie: Trie,
    seams: Seams,
}

/// Memory that is used again for the next pieces.
#[derive(Default)]
pub(crate) struct Scratch {
    looks: Vec<Whole>,
    found: Vec<[u64; 2]>,
    /// Pieces that are more than one token.
    open: Vec<usize>,
    lanes: Lanes,
    walk: long::Scratch,
}

/// The ids of several pieces.
#[derive(Default)]
pub(crate) struct Encoded {
    ids: Vec<u32>,
    /// Where those of each piece are.
    places: Vec<Range<usize>>,
}

impl Encoded {
    /// Gives back memory for more than so many ids.
    pub(crate) fn shrink(&mut self, num_ids: usize) {
        self.ids.shrink_to(num_ids);
    }

    pub(crate) fn ids_of(&self, piece: usize) -> &[u32] {
        &self.ids[self.places[piece].clone()]
    }
}

impl Scratch {
    /// Gives back memory for more than so many ids.
    pub(crate) fn shrink(&mut self, num_ids: usize) {
        self.walk.shrink(num_ids);
    }
}

impl Bpe {
    /// # Errors
    /// That the vocabulary is too large.
    pub(crate) fn new(merges: Merges) -> Result<Self, String> {
        let tokens = merges.reachable();
        Ok(Self {
            whole: WholeTokens::of(&merges, &tokens),
            trie: Trie::build(&merges, tokens)?,
            seams: Seams::of(&merges),
            merges,
        })
    }

    /// Cuts a piece of `text` where no merge can reach over, and calls `take` with each part.
    ///
    /// In writing without blanks a piece is a whole clause, which is rarely seen again; its parts are.
    #[inline]
    pub(crate) fn for_each_part(
        &self,
        text: &[u8],
        piece: Range<usize>,
        mut take: impl FnMut(Range<usize>),
    ) {
        let mut start = piece.start;
        if piece.len() >= 2 * REACH && text[start] >= LEAD_OF_THREE {
            let bytes = &text[piece.clone()];
            for at in REACH..=bytes.len() - REACH {
                if self.seams.at(bytes, at) == Seam::Clear {
                    take(start..piece.start + at);
                    start = piece.start + at;
                }
            }
        }
        take(start..piece.end);
    }

    /// Encodes pieces of `text`, none of them empty.
    pub(crate) fn encode(
        &self,
        text: &[u8],
        pieces: &[Range<usize>],
        scratch: &mut Scratch,
        encoded: &mut Encoded,
    ) {
        encoded.ids.clear();
        encoded.places.clear();
        encoded.places.resize(pieces.len(), 0..0);
        let mut give = |index: usize, tokens: &[u32]| {
            let start = encoded.ids.len();
            let ids = tokens.iter().map(|&token| self.merges.id(token));
            encoded.ids.extend(ids);
            encoded.places[index] = start..encoded.ids.len();
        };
        let Scratch {
            looks,
            found,
            open,
            lanes,
            walk,
        } = scratch;
        looks.clear();
        let asked = pieces.iter().map(|piece| self.whole.whole(text, piece));
        looks.extend(asked);
        found.clear();
        found.extend(looks.iter().map(|&whole| self.whole.look(whole)));
        open.clear();
        for (index, (&whole, &found)) in looks.iter().zip(&*found).enumerate() {
            match self.whole.answer(whole, found) {
                Some(token) => give(index, &[token]),
                None => open.push(index),
            }
        }
        let open = || {
            open.iter()
                .map(|&index| (index, &text[pieces[index].clone()]))
        };
        let is_short = |piece: &[u8]| piece.len() <= short::MAX_BYTES;
        let short = open().filter(|&(_, piece)| is_short(piece));
        lanes.encode(&self.merges, short, &mut give);
        let way = Walk {
            merges: &self.merges,
            trie: &self.trie,
            seams: &self.seams,
        };
        for (index, piece) in open().filter(|&(_, piece)| !is_short(piece)) {
            give(index, way.encode(piece, walk));
        }
    }
}
