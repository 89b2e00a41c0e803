//! Ids of one stream to text as they come: whole characters only, stops cut out.

use crate::matcher::{Matcher, Stop};
use crate::progress::Progress;
use crate::stop::StopSet;
use crate::stop_regex::StopRegex;
#[cfg(doc)]
use crate::stop_regex::MAX_HELD_REGEX_BYTES;
use crate::utf8::Utf8Stream;
use crate::vocab::TokenTable;
use std::sync::Arc;

/// How a stream treats special tokens and what stops it.
#[derive(Debug, Clone, Default)]
pub struct StreamOptions {
    /// Stop strings; none by default.
    pub stop: Option<Arc<StopSet>>,
    /// Stop patterns; none by default.
    pub stop_regex: Option<Arc<StopRegex>>,
    /// Give special tokens no text.
    pub skip_special: bool,
    /// Cut the text after what stopped it instead of before it.
    pub include_stop: bool,
}

/// What a stream has to say after some ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    /// New text; what was given before plus this is a prefix of the final text.
    pub text: String,
    /// What was found; the stream then takes no more ids.
    pub stop: Option<Stop>,
    /// Ids that count as output: all so far, or up to the one that completed the stop.
    pub kept_tokens: u32,
    /// The leading ids all of whose text was given out.
    pub emitted_tokens: u32,
}

/// Incremental decoding of one generation. Constant work per id; holds back at most 3 bytes of an
/// incomplete character and the longest stop string less one byte, or what an unfinished match of a
/// stop pattern holds (at most [`MAX_HELD_REGEX_BYTES`]).
///
/// Everything given out, with [`TextStream::finish`], equals [`TokenTable::decode`] of all ids,
/// whatever the split into calls, cut at the first place where a stop string or a match of a stop
/// pattern is complete. Of a match longer than what is held, the beginning was given out before.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = dsserve_tokenizer::testing::example_tokenizer()?;
/// use dsserve_tokenizer::{StopSet, StreamOptions, TextStream, Tokenizer};
/// use std::sync::Arc;
///
/// let tokenizer = Tokenizer::from_path(&path, 1)?;
/// let stop = StopSet::new(vec!["END".to_owned()])?.map(Arc::new);
/// let mut stream = TextStream::new(
///     Arc::clone(tokenizer.table()),
///     StreamOptions { stop, ..StreamOptions::default() },
/// );
/// let first = stream.push(&tokenizer.encode("an answer EN", false)?);
/// assert_eq!(first.text, "an answer "); // "EN" may become "END"
/// let last = stream.push(&tokenizer.encode("D and more", false)?);
/// assert_eq!(last.text, "");
/// assert!(last.stop.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TextStream {
    table: Arc<TokenTable>,
    skip_special: bool,
    include_stop: bool,
    utf8: Utf8Stream,
    /// None: the text is given out as it comes.
    matcher: Option<Matcher>,
    stopped: Option<Stop>,
    is_finished: bool,
    /// Decoded text that may be the beginning of a stop.
    held: String,
    num_tokens: u32,
    progress: Progress,
}

impl TextStream {
    /// Starts a stream.
    #[must_use]
    pub fn new(table: Arc<TokenTable>, options: StreamOptions) -> Self {
        Self {
            table,
            skip_special: options.skip_special,
            include_stop: options.include_stop,
            utf8: Utf8Stream::default(),
            matcher: Matcher::new(options.stop, options.stop_regex),
            stopped: None,
            is_finished: false,
            held: String::new(),
            num_tokens: 0,
            progress: Progress::default(),
        }
    }

    /// Takes the next ids. After a stop or the end ids are ignored and not counted.
    pub fn push(&mut self, ids: &[u32]) -> Piece {
        let mut text = String::new();
        for &id in ids {
            if self.is_over() {
                break;
            }
            self.push_id(id, &mut text);
        }
        self.piece(text)
    }

    /// Takes the next ids, of which the last one gives no text: a token that stopped the generation.
    pub fn push_stop_token(&mut self, ids: &[u32]) -> Piece {
        let Some((_, shown)) = ids.split_last() else {
            return self.push(ids);
        };
        let mut piece = self.push(shown);
        if !self.is_over() {
            self.num_tokens += 1;
            self.progress
                .hidden(self.matcher.is_some(), !self.utf8.is_empty());
            piece.kept_tokens = self.num_tokens;
            piece.emitted_tokens = self.emitted_tokens();
        }
        piece
    }

    /// Ends the stream: gives out what was held back, an incomplete character as one U+FFFD.
    /// A second call gives nothing.
    pub fn finish(&mut self) -> Piece {
        let mut text = String::new();
        if !self.is_over() {
            self.is_finished = true;
            let mut fresh = String::new();
            self.utf8.finish(&mut fresh);
            self.progress.decoded(&fresh, false, 0);
            self.scan(&fresh, &mut text);
            if self.stopped.is_none() {
                text.push_str(&std::mem::take(&mut self.held));
                self.progress.given(text.len());
            }
        }
        self.piece(text)
    }

    /// The text of what stopped the stream: the stop string, or the pattern.
    #[must_use]
    pub fn stop_text(&self) -> Option<&str> {
        self.matcher.as_ref()?.text(self.stopped?)
    }

    fn is_over(&self) -> bool {
        self.is_finished || self.stopped.is_some()
    }

    fn push_id(&mut self, id: u32, text: &mut String) {
        self.num_tokens += 1;
        let is_skipped = self.skip_special && self.table.is_special(id);
        let bytes = if is_skipped {
            &[]
        } else {
            self.table.bytes(id)
        };
        if self.matcher.is_none() {
            let given = text.len();
            self.utf8.push(bytes, text);
            if text.len() > given {
                self.progress.open_ids = 0;
            }
            self.progress.open_ids += u32::from(!self.utf8.is_empty());
            return;
        }
        let mut fresh = String::new();
        self.utf8.push(bytes, &mut fresh);
        self.progress.decoded(&fresh, !self.utf8.is_empty(), 1);
        let given = text.len();
        self.scan(&fresh, text);
        self.progress.given(text.len() - given);
    }

    /// Moves `held` + `fresh` to `text` as far as no stop can begin there any more.
    fn scan(&mut self, fresh: &str, text: &mut String) {
        let Some(matcher) = &mut self.matcher else {
            text.push_str(fresh);
            return;
        };
        let held_before = self.held.len();
        self.held.push_str(fresh);
        if let Some(found) = matcher.feed(fresh.as_bytes()) {
            let end = held_before + found.end;
            // Only of a pattern's match the beginning may have been given out.
            let start = end.saturating_sub(found.len);
            let cut = if self.include_stop { end } else { start };
            text.push_str(&self.held[..cut]);
            self.held.clear();
            self.stopped = Some(found.stop);
        } else {
            let mut ready = self.held.len() - matcher.held_len().min(self.held.len());
            while !self.held.is_char_boundary(ready) {
                ready += 1;
            }
            text.push_str(&self.held[..ready]);
            self.held.drain(..ready);
        }
    }

    fn piece(&self, text: String) -> Piece {
        Piece {
            text,
            stop: self.stopped,
            kept_tokens: self.num_tokens,
            emitted_tokens: self.emitted_tokens(),
        }
    }

    fn emitted_tokens(&self) -> u32 {
        if self.stopped.is_some() {
            self.num_tokens
        } else if self.matcher.is_none() {
            self.num_tokens - self.progress.open_ids
        } else {
            self.num_tokens - self.progress.waiting_ids()
        }
    }
}
