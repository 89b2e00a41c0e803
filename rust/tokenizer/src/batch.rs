//! Many streams by name, all of a step in one call.

use crate::decode::{Counts, Piece, StreamOptions, TextStream};
use crate::error::TokenizerError;
use crate::fast::hash::mix;
use crate::matcher::Stop;
use crate::vocab::TokenTable;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// What became of a stream's generation with the ids of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StreamEnd {
    /// It goes on.
    #[default]
    Open,
    /// It ended.
    Ended,
    /// It ended with its last id, a stop token: that id has no text unless the stream includes stops.
    StopToken,
}

/// New ids of several streams: `ids[offsets[i]..offsets[i + 1]]` belongs to `names[i]`.
#[derive(Debug, Clone, Copy)]
pub struct TokenBatch<'a> {
    /// One per stream; a name may occur more than once.
    pub names: &'a [u64],
    /// One more than names, ascending from 0 to the number of ids.
    pub offsets: &'a [u32],
    /// Ids of all streams.
    pub ids: &'a [u32],
    /// One per stream; empty if all go on.
    pub ends: &'a [StreamEnd],
}

/// What the streams of one batch had to say, in its order. Used for the next batch again, it needs no
/// new memory.
#[derive(Debug, Clone, Default)]
pub struct Pieces {
    /// Of all streams, one after the other.
    text: String,
    /// Where the text of each stream ends; None where no stream has the name.
    entries: Vec<(usize, Option<Counts>)>,
}

/// A [`Piece`] inside [`Pieces`]: what it says, with its text borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PieceRef<'a> {
    /// As [`Piece::text`].
    pub text: &'a str,
    /// As [`Piece::stop`].
    pub stop: Option<Stop>,
    /// As [`Piece::kept_tokens`].
    pub kept_tokens: u32,
    /// As [`Piece::emitted_tokens`].
    pub emitted_tokens: u32,
}

impl From<PieceRef<'_>> for Piece {
    fn from(piece: PieceRef<'_>) -> Self {
        Self {
            text: piece.text.to_owned(),
            stop: piece.stop,
            kept_tokens: piece.kept_tokens,
            emitted_tokens: piece.emitted_tokens,
        }
    }
}

impl Pieces {
    /// One per name of the batch, None where no stream has the name.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Option<PieceRef<'_>>> {
        let mut start = 0;
        self.entries.iter().map(move |&(end, counts)| {
            let text = &self.text[start..end];
            start = end;
            let counts = counts?;
            Some(PieceRef {
                text,
                stop: counts.stop,
                kept_tokens: counts.kept_tokens,
                emitted_tokens: counts.emitted_tokens,
            })
        })
    }

    /// Number of names of the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the batch had no names.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Open streams of one vocabulary, named by whoever opens them (request ids, say).
#[derive(Debug)]
pub struct StreamTable {
    vocabulary: Arc<TokenTable>,
    streams: HashMap<u64, Open, BuildHasherDefault<NameHasher>>,
    num_with_patterns: usize,
}

#[derive(Debug)]
struct Open {
    stream: TextStream,
    shows_stop_token: bool,
    has_patterns: bool,
}

impl StreamTable {
    /// An empty table.
    #[must_use]
    pub fn new(vocabulary: Arc<TokenTable>) -> Self {
        Self {
            vocabulary,
            streams: HashMap::default(),
            num_with_patterns: 0,
        }
    }

    /// Starts a stream.
    ///
    /// # Errors
    /// [`TokenizerError::StreamInUse`].
    pub fn open(&mut self, name: u64, options: StreamOptions) -> Result<(), TokenizerError> {
        if self.streams.contains_key(&name) {
            return Err(TokenizerError::StreamInUse { name });
        }
        let open = Open {
            shows_stop_token: options.include_stop,
            has_patterns: options.stop_regex.is_some(),
            stream: TextStream::new(Arc::clone(&self.vocabulary), options),
        };
        self.num_with_patterns += usize::from(open.has_patterns);
        self.streams.insert(name, open);
        Ok(())
    }

    /// Gives every stream of the batch its ids; one piece per name, in order, None where no stream
    /// has the name.
    ///
    /// With a [`StreamEnd`] other than `Open` the piece has what was held back, too. The stream stays
    /// (for [`Self::stop_text`]) until [`Self::close`].
    ///
    /// # Errors
    /// [`TokenizerError::BadOffsets`]; no stream was changed.
    pub fn push(&mut self, batch: TokenBatch<'_>) -> Result<Vec<Option<Piece>>, TokenizerError> {
        let mut pieces = Pieces::default();
        self.push_into(batch, &mut pieces)?;
        Ok(pieces.iter().map(|piece| piece.map(Piece::from)).collect())
    }

    /// As [`Self::push`], with `pieces` overwritten: no memory is taken per stream.
    ///
    /// # Errors
    /// [`TokenizerError::BadOffsets`]; no stream and no piece was changed.
    pub fn push_into(
        &mut self,
        batch: TokenBatch<'_>,
        pieces: &mut Pieces,
    ) -> Result<(), TokenizerError> {
        check(&batch)?;
        let Pieces { text, entries } = pieces;
        text.clear();
        entries.clear();
        let ends = batch.ends.iter().copied();
        let ends = ends.chain(std::iter::repeat(StreamEnd::Open));
        let streams = batch.names.iter().zip(batch.offsets.windows(2)).zip(ends);
        entries.extend(streams.map(|((name, range), end)| {
            let counts = self.streams.get_mut(name).map(|open| {
                let ids = &batch.ids[range[0] as usize..range[1] as usize];
                open.push(ids, end, text);
                open.stream.counts()
            });
            (text.len(), counts)
        }));
        Ok(())
    }

    /// Ends a stream; what it held back is in the piece. It stays (for [`Self::stop_text`]) until
    /// [`Self::close`].
    ///
    /// # Errors
    /// [`TokenizerError::UnknownStream`].
    pub fn finish(&mut self, name: u64) -> Result<Piece, TokenizerError> {
        let open = self.streams.get_mut(&name);
        let open = open.ok_or(TokenizerError::UnknownStream { name })?;
        Ok(open.stream.finish())
    }

    /// Forgets a stream; returns whether it was open.
    pub fn close(&mut self, name: u64) -> bool {
        let open = self.streams.remove(&name);
        let has_patterns = open.as_ref().is_some_and(|open| open.has_patterns);
        self.num_with_patterns -= usize::from(has_patterns);
        open.is_some()
    }

    /// Whether a stream has stop patterns: each id may then take many times longer.
    #[must_use]
    pub fn has_patterns(&self) -> bool {
        self.num_with_patterns > 0
    }

    /// Number of open streams.
    #[must_use]
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// Whether no stream is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// The stop string or pattern that stopped a stream, if one did.
    #[must_use]
    pub fn stop_text(&self, name: u64) -> Option<&str> {
        self.streams.get(&name)?.stream.stop_text()
    }
}

impl Open {
    fn push(&mut self, ids: &[u32], end: StreamEnd, text: &mut String) {
        if end == StreamEnd::StopToken && !self.shows_stop_token {
            self.stream.push_stop_token_to(ids, text);
        } else {
            self.stream.push_to(ids, text);
        }
        if end != StreamEnd::Open {
            self.stream.finish_to(text);
        }
    }
}

fn check(batch: &TokenBatch<'_>) -> Result<(), TokenizerError> {
    let TokenBatch {
        names,
        offsets,
        ids,
        ends,
    } = batch;
    let fits = offsets.len() == names.len() + 1
        && offsets.first() == Some(&0)
        && offsets
            .last()
            .is_some_and(|&last| last as usize == ids.len())
        && offsets.windows(2).all(|pair| pair[0] <= pair[1])
        && (ends.is_empty() || ends.len() == names.len());
    if fits {
        Ok(())
    } else {
        Err(TokenizerError::BadOffsets {
            names: names.len(),
            ids: ids.len(),
        })
    }
}

/// Names are chosen by the program, so their hash needs no key.
#[derive(Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix(self.0 ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, name: u64) {
        self.0 = mix(name);
    }
}
