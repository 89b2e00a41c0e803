//! Many streams by handle, many of them per call.

use crate::decode::{check_offsets, Piece, StreamOptions, TextStream};
use crate::error::TokenizerError;
use crate::vocab::TokenTable;
use std::sync::Arc;

/// New ids of several streams: `ids[offsets[i]..offsets[i + 1]]` belongs to `handles[i]`.
#[derive(Debug, Clone, Copy)]
pub struct TokenBatch<'a> {
    /// One per stream; a handle may occur more than once.
    pub handles: &'a [u64],
    /// One more than handles, ascending from 0 to the number of ids.
    pub offsets: &'a [u32],
    /// Ids of all streams.
    pub ids: &'a [u32],
}

/// Open streams. A handle is never used again for another stream.
#[derive(Debug)]
pub struct StreamTable {
    vocabulary: Arc<TokenTable>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    stream: Option<TextStream>,
}

impl StreamTable {
    /// An empty table for streams of one vocabulary.
    #[must_use]
    pub fn new(vocabulary: Arc<TokenTable>) -> Self {
        Self {
            vocabulary,
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Starts a stream and returns its handle.
    ///
    /// # Errors
    /// [`TokenizerError::TooManyStreams`] beyond 2^32 open ones.
    pub fn open(&mut self, options: StreamOptions) -> Result<u64, TokenizerError> {
        let index = if let Some(index) = self.free.pop() {
            index
        } else {
            let index =
                u32::try_from(self.slots.len()).map_err(|_| TokenizerError::TooManyStreams)?;
            self.slots.push(Slot::default());
            index
        };
        let slot = &mut self.slots[index as usize];
        slot.stream = Some(TextStream::new(Arc::clone(&self.vocabulary), options));
        Ok(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// Gives every stream of the batch its ids; one piece per handle, in order.
    ///
    /// # Errors
    /// [`TokenizerError::BadOffsets`] and [`TokenizerError::UnknownStream`]; no stream was changed.
    pub fn push(&mut self, batch: TokenBatch<'_>) -> Result<Vec<Piece>, TokenizerError> {
        check_offsets(batch.handles.len(), batch.offsets, batch.ids.len())?;
        for &handle in batch.handles {
            self.get(handle)?;
        }
        batch
            .handles
            .iter()
            .zip(batch.offsets.windows(2))
            .map(|(&handle, range)| {
                let ids = &batch.ids[range[0] as usize..range[1] as usize];
                Ok(self.get(handle)?.push(ids))
            })
            .collect()
    }

    /// Ends a stream; what it held back is in the piece. It stays open (for [`Self::stop_string`])
    /// until [`Self::close`].
    ///
    /// # Errors
    /// [`TokenizerError::UnknownStream`].
    pub fn finish(&mut self, handle: u64) -> Result<Piece, TokenizerError> {
        Ok(self.get(handle)?.finish())
    }

    /// Forgets a stream; returns whether it was open.
    pub fn close(&mut self, handle: u64) -> bool {
        if self.get(handle).is_err() {
            return false;
        }
        let index = index_of(handle);
        let slot = &mut self.slots[index as usize];
        slot.stream = None;
        // A slot whose generations are used up is retired, so that no handle comes back.
        if let Some(generation) = slot.generation.checked_add(1) {
            slot.generation = generation;
            self.free.push(index);
        }
        true
    }

    /// Number of open streams.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots
            .iter()
            .filter(|slot| slot.stream.is_some())
            .count()
    }

    /// Whether no stream is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The text of stop string `index` of a stream.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownStream`], also if the stream has no such stop string.
    pub fn stop_string(&mut self, handle: u64, index: usize) -> Result<&str, TokenizerError> {
        self.get(handle)?
            .stop_set()
            .and_then(|stop| stop.patterns().get(index))
            .map(String::as_str)
            .ok_or(TokenizerError::UnknownStream { handle })
    }

    fn get(&mut self, handle: u64) -> Result<&mut TextStream, TokenizerError> {
        let generation = (handle >> 32) as u32;
        self.slots
            .get_mut(index_of(handle) as usize)
            .filter(|slot| slot.generation == generation)
            .and_then(|slot| slot.stream.as_mut())
            .ok_or(TokenizerError::UnknownStream { handle })
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the low half of a handle is the index"
)]
fn index_of(handle: u64) -> u32 {
    handle as u32
}
