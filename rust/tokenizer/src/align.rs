//! Which stretch of the text does each id stand for? For log-probabilities, which come per id.

use crate::utf8::Utf8Stream;
use crate::vocab::TokenTable;
use std::ops::Range;
use std::sync::Arc;

/// The place of one id in the text of its stream.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AlignedToken {
    /// The id.
    pub id: u32,
    /// Its text, in bytes of the stream's text. Empty for an id in the middle of a character; the id
    /// that completes a character, or shows that it is broken, has all of it.
    pub text: Range<u64>,
    /// Characters of the stream's text before it.
    pub first_char: u64,
}

/// Places the ids of one stream in its text. The ranges of all ids lie side by side and cover it.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = dsserve_tokenizer::testing::example_tokenizer()?;
/// use dsserve_tokenizer::{TokenAligner, Tokenizer};
/// use std::sync::Arc;
///
/// let tokenizer = Tokenizer::from_path(&path, 1)?;
/// let mut aligner = TokenAligner::new(Arc::clone(tokenizer.table()), true);
/// let tokens = aligner.push(&tokenizer.encode("é!", false)?);
/// // "é" is two tokens here, of one byte each: the second one has the character.
/// let ranges: Vec<_> = tokens.iter().map(|token| token.text.clone()).collect();
/// assert_eq!(ranges, [0..0, 0..2, 2..3]);
/// assert_eq!(tokens[2].first_char, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TokenAligner {
    table: Arc<TokenTable>,
    skip_special: bool,
    utf8: Utf8Stream,
    num_bytes: u64,
    num_chars: u64,
}

impl TokenAligner {
    /// For a stream that gives special tokens text, or none if `skip_special`.
    #[must_use]
    pub fn new(table: Arc<TokenTable>, skip_special: bool) -> Self {
        Self {
            table,
            skip_special,
            utf8: Utf8Stream::default(),
            num_bytes: 0,
            num_chars: 0,
        }
    }

    /// Places the next ids.
    pub fn push(&mut self, ids: &[u32]) -> Vec<AlignedToken> {
        let mut text = String::new();
        ids.iter()
            .map(|&id| {
                text.clear();
                let bytes = self.table.shown(id, self.skip_special);
                self.utf8.push(bytes, &mut text);
                let first_char = self.num_chars;
                AlignedToken {
                    id,
                    text: self.advance(&text),
                    first_char,
                }
            })
            .collect()
    }

    /// Ends the stream: what follows the last id's range, if a character is incomplete, is one
    /// U+FFFD, and belongs to that id.
    pub fn finish(&mut self) -> Range<u64> {
        let mut text = String::new();
        self.utf8.finish(&mut text);
        self.advance(&text)
    }

    fn advance(&mut self, text: &str) -> Range<u64> {
        let start = self.num_bytes;
        self.num_bytes += text.len() as u64;
        self.num_chars += text.chars().count() as u64;
        start..self.num_bytes
    }
}
