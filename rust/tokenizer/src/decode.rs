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
///
/// Fill in what matters and take the rest from [`StreamOptions::default`]: versions of this crate may
/// add fields.
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
#[non_exhaustive]
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
    utf8: Utf8Stream,
    skip_special: bool,
    is_finished: bool,
    num_tokens: u32,
    /// Without stops: the latest ids, whose text ends in the character that is still incomplete.
    open_ids: u32,
    /// None: the text is given out as it comes.
    stops: Option<Box<Stops>>,
}

/// What a stream with stops needs besides: in a box of its own, since most streams have none.
#[derive(Debug)]
struct Stops {
    matcher: Matcher,
    include_stop: bool,
    stopped: Option<Stop>,
    /// Decoded text that may be the beginning of a stop.
    held: String,
    progress: Progress,
}

/// What a [`Piece`] says besides its text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counts {
    pub stop: Option<Stop>,
    pub kept_tokens: u32,
    pub emitted_tokens: u32,
}

impl TextStream {
    /// Starts a stream.
    #[must_use]
    pub fn new(table: Arc<TokenTable>, options: StreamOptions) -> Self {
        let include_stop = options.include_stop;
        let matcher = Matcher::new(options.stop, options.stop_regex);
        Self {
            table,
            utf8: Utf8Stream::default(),
            skip_special: options.skip_special,
            is_finished: false,
            num_tokens: 0,
            open_ids: 0,
            stops: matcher.map(|matcher| {
                Box::new(Stops {
                    matcher,
                    include_stop,
                    stopped: None,
                    held: String::new(),
                    progress: Progress::default(),
                })
            }),
        }
    }

    /// Takes the next ids. After a stop or the end ids are ignored and not counted.
    pub fn push(&mut self, ids: &[u32]) -> Piece {
        let mut text = String::new();
        self.push_to(ids, &mut text);
        self.piece(text)
    }

    /// Takes the next ids, of which the last one gives no text: a token that stopped the generation.
    pub fn push_stop_token(&mut self, ids: &[u32]) -> Piece {
        let mut text = String::new();
        self.push_stop_token_to(ids, &mut text);
        self.piece(text)
    }

    /// Ends the stream: gives out what was held back, an incomplete character as one U+FFFD.
    /// A second call gives nothing.
    pub fn finish(&mut self) -> Piece {
        let mut text = String::new();
        self.finish_to(&mut text);
        self.piece(text)
    }

    /// The text of what stopped the stream: the stop string, or the pattern.
    #[must_use]
    pub fn stop_text(&self) -> Option<&str> {
        let stops = self.stops.as_ref()?;
        stops.matcher.text(stops.stopped?)
    }

    /// As [`Self::push`], with the text appended to `text`.
    pub(crate) fn push_to(&mut self, ids: &[u32], text: &mut String) {
        for &id in ids {
            if self.is_over() {
                break;
            }
            self.push_id(id, text);
        }
    }

    /// As [`Self::push_stop_token`], with the text appended to `text`.
    pub(crate) fn push_stop_token_to(&mut self, ids: &[u32], text: &mut String) {
        let Some((_, shown)) = ids.split_last() else {
            return;
        };
        self.push_to(shown, text);
        if self.is_over() {
            return;
        }
        self.num_tokens += 1;
        let is_open = !self.utf8.is_empty();
        match &mut self.stops {
            Some(stops) => stops.progress.hidden(is_open),
            None => self.open_ids += u32::from(is_open),
        }
    }

    /// As [`Self::finish`], with the text appended to `text`.
    pub(crate) fn finish_to(&mut self, text: &mut String) {
        if self.is_over() {
            return;
        }
        self.is_finished = true;
        if let Some(stops) = &mut self.stops {
            let fresh_at = stops.held.len();
            self.utf8.finish(&mut stops.held);
            stops.scan(fresh_at, false, 0, text);
            stops.release(text);
        } else {
            self.utf8.finish(text);
            self.open_ids = 0;
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        let (stop, waiting_ids) = match &self.stops {
            Some(stops) if stops.stopped.is_some() => (stops.stopped, 0),
            Some(stops) => (None, stops.progress.waiting_ids()),
            None => (None, self.open_ids),
        };
        Counts {
            stop,
            kept_tokens: self.num_tokens,
            emitted_tokens: self.num_tokens - waiting_ids,
        }
    }

    fn piece(&self, text: String) -> Piece {
        let counts = self.counts();
        Piece {
            text,
            stop: counts.stop,
            kept_tokens: counts.kept_tokens,
            emitted_tokens: counts.emitted_tokens,
        }
    }

    fn is_over(&self) -> bool {
        self.is_finished || (self.stops.as_ref()).is_some_and(|stops| stops.stopped.is_some())
    }

    fn push_id(&mut self, id: u32, text: &mut String) {
        self.num_tokens += 1;
        let bytes = self.table.shown(id, self.skip_special);
        if let Some(stops) = &mut self.stops {
            let fresh_at = stops.held.len();
            self.utf8.push(bytes, &mut stops.held);
            stops.scan(fresh_at, !self.utf8.is_empty(), 1, text);
        } else {
            let given = text.len();
            self.utf8.push(bytes, text);
            if text.len() > given {
                self.open_ids = 0;
            }
            self.open_ids += u32::from(!self.utf8.is_empty());
        }
    }
}

impl Stops {
    /// Looks at `held[fresh_at..]`, which `num_ids` more ids brought, leaving an incomplete character
    /// if `is_open`; moves to `text` what no stop can begin in any more.
    fn scan(&mut self, fresh_at: usize, is_open: bool, num_ids: u32, text: &mut String) {
        let fresh = &self.held[fresh_at..];
        self.progress.decoded(fresh, is_open, num_ids);
        if let Some(found) = self.matcher.feed(fresh.as_bytes()) {
            let end = fresh_at + found.end;
            // Only of a pattern's match the beginning may have been given out.
            let start = end.saturating_sub(found.len);
            let cut = if self.include_stop { end } else { start };
            text.push_str(&self.held[..cut]);
            self.held.clear();
            self.stopped = Some(found.stop);
            return;
        }
        let mut ready = self.held.len() - self.matcher.held_len().min(self.held.len());
        while !self.held.is_char_boundary(ready) {
            ready += 1;
        }
        text.push_str(&self.held[..ready]);
        self.held.drain(..ready);
        self.progress.given(ready);
    }

    /// Moves everything to `text`; after a stop there is nothing.
    fn release(&mut self, text: &mut String) {
        text.push_str(&self.held);
        self.progress.given(self.held.len());
        self.held.clear();
    }
}
