//! Words that the cache does not know: their ids are left open, found for many of them at a time, and put
//! where they belong.

use super::bpe::{Bpe, Encoded, Scratch};
use super::word_cache::{Found, Place, WordCache};
use std::ops::Range;

/// So many words are looked up together.
const MAX_WORDS: usize = 128;
/// Most gaps, and most ids behind the first one, that wait for words to look up: a text may have one new
/// word, a million times.
const MAX_WAITING: usize = 1 << 14;
/// Ids that the memory for a text may have room for afterwards.
const MAX_KEPT: usize = 1 << 16;

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

    /// Whether it is time to fill them; `out` has so many ids.
    #[inline]
    pub(crate) fn are_many(&self, num_ids: usize) -> bool {
        self.words.len() >= MAX_WORDS
            || self.open.len() >= MAX_WAITING
            || self
                .open
                .first()
                .is_some_and(|&(first, _)| num_ids - first >= MAX_WAITING)
    }

    /// Gives back memory that an unusual text took.
    pub(crate) fn shrink(&mut self) {
        self.scratch.shrink(MAX_KEPT);
        self.encoded.shrink(MAX_KEPT);
        self.behind.shrink_to(MAX_KEPT);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_new_word_again_and_again_does_not_wait_for_ever() {
        let (mut gaps, mut cache) = (Gaps::default(), WordCache::default());
        let mut out = Vec::new();
        let mut num_words = 0;
        while !gaps.are_many(out.len()) {
            gaps.add(b"word", 0..4, &mut cache, &mut out);
            num_words += 1;
        }
        assert_eq!(num_words, MAX_WAITING);
    }

    #[test]
    fn memory_for_an_unusual_text_is_given_back() {
        let mut gaps = Gaps::default();
        gaps.behind.reserve(4 * MAX_KEPT);
        gaps.shrink();
        assert!(gaps.behind.capacity() < 2 * MAX_KEPT);
    }

    #[test]
    fn known_words_behind_a_new_one_do_not_wait_for_ever() {
        let (mut gaps, mut cache) = (Gaps::default(), WordCache::default());
        let mut out = Vec::new();
        let found = cache.find(b"known", &(0..5), 0, &mut out);
        let Found::New(Some(place)) = found else {
            panic!("it is new");
        };
        cache.tell(place, &[7]);
        gaps.add(b"word", 0..4, &mut cache, &mut out);
        while !gaps.are_many(out.len()) {
            gaps.add(b"known", 0..5, &mut cache, &mut out);
        }
        assert_eq!(out.len(), MAX_WAITING);
    }
}
