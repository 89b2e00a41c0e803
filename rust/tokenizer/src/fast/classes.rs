//! Which kind of character is this? One table lookup a character.

use super::class_table::{LETTERS, MARKS, NUMBERS, PUNCTUATION, SPACES, SYMBOLS};
use std::sync::LazyLock;

/// What the split patterns tell apart. Every character has exactly one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Class {
    /// None of the others: controls, formats such as the zero-width joiner, unassigned.
    Other,
    Letter,
    Mark,
    Number,
    /// Punctuation and symbols.
    Punctuation,
    /// White space but line ends.
    Space,
    /// `\r` and `\n`.
    Newline,
}

/// A class, and whether the character is in the CJK range of the released pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    pub class: Class,
    pub is_cjk: bool,
}

const BLOCK_LEN: usize = 256;

/// Blocks of 256 code points, equal ones stored once.
struct Table {
    ascii: [Kind; 128],
    /// Block of each code point / 256; beyond the last one everything is [`Class::Other`].
    block_of: Vec<u8>,
    blocks: Vec<[Kind; BLOCK_LEN]>,
}

const OTHER: Kind = Kind {
    class: Class::Other,
    is_cjk: false,
};

const FIRST_IDEOGRAPH: u32 = 0x4E00;
const LAST_IDEOGRAPH: u32 = 0x9FA5;

const IDEOGRAPH: Kind = Kind {
    class: Class::Letter,
    is_cjk: true,
};

static TABLE: LazyLock<Table> = LazyLock::new(Table::build);

/// A handle on the table: taken once a text, so that a lookup checks nothing.
#[derive(Clone, Copy)]
pub(crate) struct Classes(&'static Table);

impl Classes {
    pub(crate) fn get() -> Self {
        Self(&TABLE)
    }

    pub(crate) fn of(self, c: char) -> Kind {
        let code = c as usize;
        match self.0.block_of.get(code / BLOCK_LEN) {
            Some(&block) => self.0.blocks[usize::from(block)][code % BLOCK_LEN],
            None => OTHER,
        }
    }

    /// The kind and length of the character at `at`, which lies inside `text` on a boundary.
    #[inline]
    pub(crate) fn at(self, text: &str, at: usize) -> (Kind, usize) {
        let bytes = text.as_bytes();
        let first = bytes[at];
        if first < 0x80 {
            return (self.0.ascii[usize::from(first)], 1);
        }
        let next = |index: usize| u32::from(bytes[at + index] & 0x3F);
        let (code, len) = if first < 0xE0 {
            (u32::from(first & 0x1F) << 6 | next(1), 2)
        } else if first < 0xF0 {
            (u32::from(first & 0x0F) << 12 | next(1) << 6 | next(2), 3)
        } else {
            let head = u32::from(first & 0x07) << 18 | next(1) << 12;
            (head | next(2) << 6 | next(3), 4)
        };
        // Most characters above ASCII are these, and they need no table.
        if (FIRST_IDEOGRAPH..=LAST_IDEOGRAPH).contains(&code) {
            return (IDEOGRAPH, len);
        }
        (char::from_u32(code).map_or(OTHER, |c| self.of(c)), len)
    }
}

impl Table {
    fn build() -> Self {
        let mut kinds = vec![OTHER; 0x11_0000];
        let lists: [(&[u32], Class); 6] = [
            (&LETTERS, Class::Letter),
            (&MARKS, Class::Mark),
            (&NUMBERS, Class::Number),
            (&PUNCTUATION, Class::Punctuation),
            (&SYMBOLS, Class::Punctuation),
            (&SPACES, Class::Space),
        ];
        for (ranges, class) in lists {
            for range in ranges.chunks_exact(2) {
                for kind in &mut kinds[range[0] as usize..=range[1] as usize] {
                    kind.class = class;
                }
            }
        }
        for end in ['\r', '\n'] {
            kinds[end as usize].class = Class::Newline;
        }
        for (first, last) in [(FIRST_IDEOGRAPH, LAST_IDEOGRAPH), (0x3040, 0x30FF)] {
            for kind in &mut kinds[first as usize..=last as usize] {
                kind.is_cjk = true;
            }
        }
        let used = kinds.iter().rposition(|kind| *kind != OTHER).unwrap_or(0) + 1;
        let mut table = Self {
            ascii: std::array::from_fn(|code| kinds[code]),
            block_of: Vec::new(),
            blocks: Vec::new(),
        };
        for chunk in kinds[..used.next_multiple_of(BLOCK_LEN)].chunks_exact(BLOCK_LEN) {
            let mut block = [OTHER; BLOCK_LEN];
            block.copy_from_slice(chunk);
            let known = table.blocks.iter().position(|other| *other == block);
            let index = known.unwrap_or_else(|| {
                table.blocks.push(block);
                table.blocks.len() - 1
            });
            table
                .block_of
                .push(u8::try_from(index).expect("fewer than 256 different blocks"));
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior,
    };

    /// The code points that the reference's engine finds for `pattern`.
    fn found_by_reference(pattern: &str, all: &str) -> Vec<char> {
        let split = Split::new(
            SplitPattern::Regex(pattern.to_owned()),
            SplitDelimiterBehavior::Removed,
            true,
        )
        .unwrap();
        let mut text = PreTokenizedString::from(all);
        split.pre_tokenize(&mut text).unwrap();
        text.get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .flat_map(|(piece, ..)| piece.chars().collect::<Vec<_>>())
            .collect()
    }

    #[test]
    fn classes_are_those_of_the_reference() {
        let all: String = (0..=0x0010_FFFF).filter_map(char::from_u32).collect();
        let classes = Classes::get();
        let of_class = |wanted: &[Class]| -> Vec<char> {
            all.chars()
                .filter(|&c| wanted.contains(&classes.of(c).class))
                .collect()
        };
        for (pattern, wanted) in [
            (r"\p{L}+", &[Class::Letter][..]),
            (r"\p{M}+", &[Class::Mark]),
            (r"\p{N}+", &[Class::Number]),
            (r"[\p{P}\p{S}]+", &[Class::Punctuation]),
            (r"\s+", &[Class::Space, Class::Newline]),
            (r"[\r\n]+", &[Class::Newline]),
        ] {
            assert!(
                found_by_reference(pattern, &all) == of_class(wanted),
                "{pattern}"
            );
        }
        let cjk: Vec<char> = all.chars().filter(|&c| classes.of(c).is_cjk).collect();
        assert!(found_by_reference("[一-龥\u{3040}-ゟ゠-ヿ]+", &all) == cjk);
    }

    #[test]
    fn a_character_is_read_at_its_place() {
        let classes = Classes::get();
        for c in [
            'a',
            '\u{7F}',
            '\u{80}',
            'é',
            '你',
            '\u{FFFF}',
            '👩',
            '\u{10FFFF}',
        ] {
            let text = format!("x{c}y");
            assert_eq!(classes.at(&text, 1), (classes.of(c), c.len_utf8()));
        }
    }
}
