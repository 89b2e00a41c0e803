//! Words that the cache does not know: their ids are left open, found for many of them at a time, and put
//! where they belong.

use super::bpe::{Bpe, Encoded, Scratch};
use super::word_cache::{Found, Place, WordCache};
use std::ops::Range;

/// So many words are looked up together.
const MAX_WORDS: usize = 128;

/// Open places among the ids of a text.
#[derive(Default)]
pub(crate) struct Gaps {
    words: Vec<Range<usize>>,
    /// Of each word in the cache.
    places: Vec<Option<Place>>,
    /// How many ids are before each gap, and its word.
    open: Vec<(usize, u32)>,
    scratch: Scratch,
    encoded: Encoded,
    /// Ids behind the first gap, while gaps are filled.
    behind: Vec<u32>,
}

impl Gaps {
    /// Appends the ids of a word of the text, or leaves a gap for them.
    #[inline]
    pub(crate) fn add(
        &mut self,
        text: &[u8],
        word: Range<usize>,
        cache: &mut WordCache,
        out: &mut Vec<u32>,
    ) {
        let name = u32::try_from(self.words.len()).expect("a few words");
        let word = match cache.find(text, &word, name, out) {
            Found::Ids => return,
            Found::Open(known) => known,
            Found::New(place) => {
                self.words.push(word);
                self.places.push(place);
                name
            }
        };
        self.open.push((out.len(), word));
    }

    pub(crate) fn are_many(&self) -> bool {
        self.words.len() >= MAX_WORDS
    }

    /// Puts the missing ids into `out`, and into the cache.
    pub(crate) fn fill(
        &mut self,
        text: &[u8],
        bpe: &Bpe,
        cache: &mut WordCache,
        out: &mut Vec<u32>,
    ) {
        let Some(&(first, _)) = self.open.first() else {
            return;
        };
        bpe.encode(text, &self.words, &mut self.scratch, &mut self.encoded);
        for (index, place) in self.places.iter().enumerate() {
            if let &Some(place) = place {
                cache.tell(place, self.encoded.ids_of(index));
            }
        }
        self.behind.clear();
        self.behind.extend(out.drain(first..));
        let mut done = first;
        for &(place, word) in &self.open {
            out.extend_from_slice(&self.behind[done - first..place - first]);
            out.extend_from_slice(self.encoded.ids_of(word as usize));
            done = place;
        }
        out.extend_from_slice(&self.behind[done - first..]);
        self.words.clear();
        self.places.clear();
        self.open.clear();
        cache.make_room(MAX_WORDS);
    }
}
