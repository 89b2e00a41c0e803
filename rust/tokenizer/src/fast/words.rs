//! Cuts text into the pieces that merges never cross, as the split patterns of `tokenizer.json` do.

use super::classes::{Class, Classes, Kind};
use std::ops::Range;

/// A split pattern known here; [`crate::split`] recognises it in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// The released one: digits in groups of at most this many, runs of CJK, then words.
    DeepSeek { max_digits: usize },
    /// GPT-2's, which a `ByteLevel` step with `use_regex` has built in.
    Gpt2,
}

/// Reads a text piece by piece.
pub(crate) struct Words<'a> {
    text: &'a str,
    pattern: Pattern,
    classes: Classes,
    at: usize,
}

impl<'a> Words<'a> {
    pub(crate) fn new(text: &'a str, pattern: Pattern) -> Self {
        Self {
            text,
            pattern,
            classes: Classes::get(),
            at: 0,
        }
    }

    fn kind(&self, at: usize) -> Option<(Kind, usize)> {
        (at < self.text.len()).then(|| self.classes.at(self.text, at))
    }

    /// Moves past the characters from `at` on that satisfy `is_in`.
    fn skip(&self, mut at: usize, is_in: impl Fn(Kind) -> bool) -> usize {
        while let Some((kind, len)) = self.kind(at) {
            if !is_in(kind) {
                break;
            }
            at += len;
        }
        at
    }

    /// End of the piece of the released pattern that starts at `start`.
    fn deepseek_end(&self, start: usize, max_digits: usize) -> Option<usize> {
        let bytes = self.text.as_bytes();
        let is_ascii_letter = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphabetic);
        // Most pieces of most texts.
        if is_ascii_letter(start) {
            return Some(self.word_end(start + 1, false));
        }
        let (first, first_len) = self.kind(start)?;
        let next_at = start + first_len;
        if bytes[start] == b' ' && is_ascii_letter(next_at) {
            return Some(self.word_end(next_at + 1, false));
        }
        if first.class == Class::Number {
            return Some(self.digits_end(next_at, max_digits));
        }
        // The steps before have cut around digits and CJK: what lies beyond is out of sight.
        let is_here = |kind: Kind| kind.is_cjk == first.is_cjk && kind.class != Class::Number;
        let is_word = |kind: Kind| {
            matches!(kind.class, Class::Letter | Class::Mark) && kind.is_cjk == first.is_cjk
        };
        let next = self
            .kind(next_at)
            .map(|(kind, _)| kind)
            .filter(|&kind| is_here(kind));
        let next_is_word = next.is_some_and(is_word);
        let end = match first.class {
            Class::Letter | Class::Mark => self.word_end(next_at, first.is_cjk),
            Class::Punctuation => {
                if bytes[start].is_ascii() && is_ascii_letter(next_at) {
                    letters_end(bytes, next_at)
                } else {
                    self.punctuation_end(next_at, is_here)
                }
            }
            Class::Space | Class::Other if next_is_word => self.word_end(next_at, first.is_cjk),
            Class::Space
                if bytes[start] == b' '
                    && next.is_some_and(|kind| kind.class == Class::Punctuation) =>
            {
                self.punctuation_end(next_at, is_here)
            }
            Class::Space | Class::Newline => self.deepseek_blank_end(start, is_here),
            Class::Other | Class::Number => self.gap_end(next_at, is_here, is_word),
        };
        Some(end)
    }

    /// `[\p{L}\p{M}]*` of CJK, or of all else.
    fn word_end(&self, mut at: usize, is_cjk: bool) -> usize {
        let bytes = self.text.as_bytes();
        loop {
            if !is_cjk {
                at = letters_end(bytes, at);
            }
            match self.kind(at) {
                Some((kind, len))
                    if matches!(kind.class, Class::Letter | Class::Mark)
                        && kind.is_cjk == is_cjk =>
                {
                    at += len;
                }
                _ => return at,
            }
        }
    }

    fn digits_end(&self, mut at: usize, max_digits: usize) -> usize {
        for _ in 1..max_digits {
            match self.kind(at) {
                Some((kind, len)) if kind.class == Class::Number => at += len,
                _ => break,
            }
        }
        at
    }

    fn punctuation_end(&self, at: usize, is_here: impl Fn(Kind) -> bool) -> usize {
        let end = self.skip(at, |kind| kind.class == Class::Punctuation && is_here(kind));
        self.skip(end, |kind| kind.class == Class::Newline && is_here(kind))
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+`: up to the last line end, else all but the blank before a word.
    fn deepseek_blank_end(&self, start: usize, is_here: impl Fn(Kind) -> bool) -> usize {
        let mut end = start;
        let mut newline_end = None;
        let mut last_at = start;
        while let Some((kind, len)) = self.kind(end).filter(|&(kind, _)| is_here(kind)) {
            match kind.class {
                Class::Newline => newline_end = Some(end + len),
                Class::Space => {}
                _ => return newline_end.unwrap_or(if last_at > start { last_at } else { end }),
            }
            last_at = end;
            end += len;
        }
        newline_end.unwrap_or(end)
    }

    /// Characters that no alternative begins with, up to one that does.
    fn gap_end(
        &self,
        mut at: usize,
        is_here: impl Fn(Kind) -> bool,
        is_word: impl Fn(Kind) -> bool,
    ) -> usize {
        while let Some((kind, len)) = self.kind(at).filter(|&(kind, _)| is_here(kind)) {
            let leads_word = || self.kind(at + len).is_some_and(|(kind, _)| is_word(kind));
            if kind.class != Class::Other || leads_word() {
                break;
            }
            at += len;
        }
        at
    }

    /// End of the piece of GPT-2's pattern
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
    fn gpt2_end(&self, start: usize) -> Option<usize> {
        let (first, first_len) = self.kind(start)?;
        let bytes = &self.text.as_bytes()[start..];
        for suffix in ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"] {
            if bytes.starts_with(suffix.as_bytes()) {
                return Some(start + suffix.len());
            }
        }
        let after = start + first_len;
        let is_led = bytes[0] == b' '
            && self
                .kind(after)
                .is_some_and(|(kind, _)| gpt2_group(kind) != Gpt2Group::Blank);
        let (group, from) = match self.kind(after) {
            Some((kind, len)) if is_led => (gpt2_group(kind), after + len),
            _ => (gpt2_group(first), after),
        };
        if group != Gpt2Group::Blank {
            return Some(self.skip(from, |kind| gpt2_group(kind) == group));
        }
        let mut last_at = start;
        let mut end = after;
        while let Some((kind, len)) = self.kind(end) {
            if gpt2_group(kind) != Gpt2Group::Blank {
                return Some(if last_at > start { last_at } else { end });
            }
            last_at = end;
            end += len;
        }
        Some(end)
    }
}

/// Where the ASCII letters from `at` on end. Eight bytes at a time: how long a word is cannot be foretold,
/// so a loop over its letters costs a wrong branch each time.
fn letters_end(bytes: &[u8], mut at: usize) -> usize {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x80 * EACH;
    while let Some(eight) = bytes.get(at..at + 8) {
        let eight = u64::from_le_bytes(eight.try_into().expect("eight bytes"));
        let lower = (eight | (0x20 * EACH)) & !HIGH;
        // Bit 7 of each byte, whose lower bits cannot overflow.
        let from_a = lower + (0x80 - u64::from(b'a')) * EACH;
        let beyond_z = lower + (0x7F - u64::from(b'z')) * EACH;
        let others = !(from_a & !beyond_z & !eight) & HIGH;
        if others != 0 {
            return at + others.trailing_zeros() as usize / 8;
        }
        at += 8;
    }
    while bytes.get(at).is_some_and(u8::is_ascii_alphabetic) {
        at += 1;
    }
    at
}

#[derive(PartialEq, Eq)]
enum Gpt2Group {
    Letter,
    Number,
    Blank,
    Rest,
}

fn gpt2_group(kind: Kind) -> Gpt2Group {
    match kind.class {
        Class::Letter => Gpt2Group::Letter,
        Class::Number => Gpt2Group::Number,
        Class::Space | Class::Newline => Gpt2Group::Blank,
        Class::Mark | Class::Punctuation | Class::Other => Gpt2Group::Rest,
    }
}

impl Iterator for Words<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        let start = self.at;
        self.at = match self.pattern {
            Pattern::DeepSeek { max_digits } => self.deepseek_end(start, max_digits)?,
            Pattern::Gpt2 => self.gpt2_end(start)?,
        };
        Some(start..self.at)
    }
}
