//! Ids of one stream to text as they come: whole characters only, stop strings cut out.

use crate::error::TokenizerError;
use crate::stop::{Hit, StopSet};
use crate::vocab::TokenTable;
use aho_corasick::automaton::StateID;
use std::collections::VecDeque;
use std::sync::Arc;

/// How a stream treats special tokens and stop strings.
#[derive(Debug, Clone, Default)]
pub struct StreamOptions {
    /// Stop strings; none by default.
    pub stop: Option<Arc<StopSet>>,
    /// Give special tokens no text.
    pub skip_special: bool,
    /// Cut the text after the stop string instead of before it.
    pub include_stop: bool,
}

/// What a stream has to say after some ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    /// New text; what was given before plus this is a prefix of the final text.
    pub text: String,
    /// Index of the stop string that was found; the stream then takes no more ids.
    pub stop: Option<usize>,
    /// Ids that count as output: all so far, or up to the one that completed the stop string.
    pub kept_tokens: u32,
    /// The leading ids all of whose text was given out.
    pub emitted_tokens: u32,
}

/// Incremental decoding of one generation. Constant work per id; holds back at most 3 bytes of an
/// incomplete character and the longest stop string less one byte.
///
/// Everything given out, with [`TextStream::finish`], equals [`TokenTable::decode`] of all ids,
/// whatever the split into calls, cut at the first place where a stop string is complete.
#[derive(Debug)]
pub struct TextStream {
    table: Arc<TokenTable>,
    options: StreamOptions,
    utf8: Utf8Stream,
    stop_state: Option<StateID>,
    stopped: Option<usize>,
    /// Decoded text that may be the beginning of a stop string.
    held: String,
    num_tokens: u32,
    progress: Progress,
}

impl TextStream {
    /// Starts a stream.
    #[must_use]
    pub fn new(table: Arc<TokenTable>, options: StreamOptions) -> Self {
        let stop_state = options.stop.as_ref().map(|stop| stop.start());
        Self {
            table,
            options,
            utf8: Utf8Stream::default(),
            stop_state,
            stopped: None,
            held: String::new(),
            num_tokens: 0,
            progress: Progress::default(),
        }
    }

    /// Takes the next ids. After a stop string ids are ignored and not counted.
    pub fn push(&mut self, ids: &[u32]) -> Piece {
        let mut text = String::new();
        for &id in ids {
            if self.stopped.is_some() {
                break;
            }
            self.push_id(id, &mut text);
        }
        self.piece(text)
    }

    /// Ends the stream: gives out what was held back, an incomplete character as one U+FFFD.
    /// A second call gives nothing.
    pub fn finish(&mut self) -> Piece {
        let mut text = String::new();
        if self.stopped.is_none() {
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

    /// The stop strings of this stream.
    #[must_use]
    pub fn stop_set(&self) -> Option<&Arc<StopSet>> {
        self.options.stop.as_ref()
    }

    fn push_id(&mut self, id: u32, text: &mut String) {
        self.num_tokens += 1;
        let is_skipped = self.options.skip_special && self.table.is_special(id);
        let bytes = if is_skipped {
            &[]
        } else {
            self.table.bytes(id)
        };
        if self.options.stop.is_none() {
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

    /// Moves `held` + `fresh` to `text` as far as no stop string can begin there any more.
    fn scan(&mut self, fresh: &str, text: &mut String) {
        let (Some(stop), Some(state)) = (&self.options.stop, &mut self.stop_state) else {
            text.push_str(fresh);
            return;
        };
        let held_before = self.held.len();
        self.held.push_str(fresh);
        if let Some(Hit { pattern, end }) = stop.feed(state, fresh.as_bytes()) {
            let end = held_before + end;
            // `held` began where the automaton's memory began, so the pattern lies inside it.
            let cut = if self.options.include_stop {
                end
            } else {
                end - stop.patterns()[pattern].len()
            };
            text.push_str(&self.held[..cut]);
            self.held.clear();
            self.stopped = Some(pattern);
        } else {
            let ready = self.held.len() - stop.held_len(*state);
            text.push_str(&self.held[..ready]);
            self.held.drain(..ready);
        }
    }

    fn piece(&self, text: String) -> Piece {
        let emitted_tokens = if self.stopped.is_some() {
            self.num_tokens
        } else if self.options.stop.is_none() {
            self.num_tokens - self.progress.open_ids
        } else {
            self.num_tokens - self.progress.waiting_ids()
        };
        Piece {
            text,
            stop: self.stopped,
            kept_tokens: self.num_tokens,
            emitted_tokens,
        }
    }
}

/// Which ids still have text to come.
#[derive(Debug, Default)]
struct Progress {
    /// Bytes of text decoded and given out so far.
    decoded_bytes: u64,
    given_bytes: u64,
    /// (end of their text, how many ids), ascending, for ids whose end is known but not given out.
    ends: VecDeque<(u64, u32)>,
    /// Latest ids, whose text ends in the character that is still incomplete.
    open_ids: u32,
}

impl Progress {
    /// Notes that `num_ids` more ids brought `fresh`, leaving an incomplete character if `is_open`.
    fn decoded(&mut self, fresh: &str, is_open: bool, num_ids: u32) {
        if let Some(first) = fresh.chars().next() {
            // An incomplete character always becomes exactly the next one, good or U+FFFD.
            let open_ids = std::mem::take(&mut self.open_ids);
            self.note_end(self.decoded_bytes + first.len_utf8() as u64, open_ids);
        }
        self.decoded_bytes += fresh.len() as u64;
        if is_open {
            self.open_ids += num_ids;
        } else {
            self.note_end(self.decoded_bytes, num_ids);
        }
    }

    fn note_end(&mut self, end: u64, num_ids: u32) {
        match self.ends.back_mut() {
            _ if num_ids == 0 => {}
            Some((last, count)) if *last == end => *count += num_ids,
            _ => self.ends.push_back((end, num_ids)),
        }
    }

    fn given(&mut self, bytes: usize) {
        self.given_bytes += bytes as u64;
        while self
            .ends
            .front()
            .is_some_and(|&(end, _)| end <= self.given_bytes)
        {
            self.ends.pop_front();
        }
    }

    fn waiting_ids(&self) -> u32 {
        self.open_ids + self.ends.iter().map(|(_, count)| count).sum::<u32>()
    }
}

/// Bytes to characters; holds back at most 3 bytes of an incomplete one.
#[derive(Debug, Default)]
struct Utf8Stream {
    /// A valid beginning of a character that needs more bytes.
    pending: Vec<u8>,
}

impl Utf8Stream {
    fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Appends what `bytes` complete to `text`; every maximal broken part becomes one U+FFFD, as in
    /// `String::from_utf8_lossy`.
    fn push(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty() {
            let rest = decode_prefix(bytes, text);
            self.pending.extend_from_slice(rest);
        } else {
            self.pending.extend_from_slice(bytes);
            let rest_len = decode_prefix(&self.pending, text).len();
            self.pending.drain(..self.pending.len() - rest_len);
        }
    }

    fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Decodes as much of `bytes` as can be told now; returns the incomplete end.
fn decode_prefix<'a>(mut bytes: &'a [u8], text: &mut String) -> &'a [u8] {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                return &[];
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                let Some(broken_len) = error.error_len() else {
                    return rest;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[broken_len..];
            }
        }
    }
}

/// Checks that a handle list and offsets describe slices of `ids`.
pub(crate) fn check_offsets(
    num_handles: usize,
    offsets: &[u32],
    num_ids: usize,
) -> Result<(), TokenizerError> {
    let fits = offsets.len() == num_handles + 1
        && offsets.first() == Some(&0)
        && offsets.last().is_some_and(|&last| last as usize == num_ids)
        && offsets.windows(2).all(|pair| pair[0] <= pair[1]);
    if fits {
        Ok(())
    } else {
        Err(TokenizerError::BadOffsets {
            handles: num_handles,
            ids: num_ids,
        })
    }
}
