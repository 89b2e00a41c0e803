//! Python classes over the streams of the tokenizer crate: `StreamOptions`, `StreamDecoder` and what it
//! returns, `TokenAligner`.

use crate::id_bytes::{parse_u32, parse_u64, read_u32};
use crate::tokenizer::{to_py_error, Tokenizer, DETACH_IDS};
use dsserve_tokenizer as core;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// What one stream had to say after some ids.
#[pyclass(frozen, get_all, module = "dsserve._native")]
pub struct Piece {
    text: String,
    stop: Option<String>,
    kept_tokens: u32,
    emitted_tokens: u32,
}

/// What the streams of one batch had to say, in its order.
#[pyclass(frozen, get_all, module = "dsserve._native")]
pub struct StepPieces {
    /// None where no stream has the name.
    texts: Py<PyList>,
    /// The stops that were found, by position in the batch.
    stops: HashMap<usize, String>,
    kept_tokens: Vec<u32>,
    emitted_tokens: Vec<u32>,
}

/// How streams become text, with the automata of what stops them; any number of streams may share it.
#[pyclass(frozen, module = "dsserve._native")]
pub struct StreamOptions {
    inner: core::StreamOptions,
}

#[pymethods]
impl StreamOptions {
    #[new]
    #[pyo3(signature = (
        stop = Vec::new(), skip_special = true, include_stop = false, stop_regex = Vec::new()
    ))]
    fn new(
        py: Python<'_>,
        stop: Vec<String>,
        skip_special: bool,
        include_stop: bool,
        stop_regex: Vec<String>,
    ) -> PyResult<Self> {
        let compile = || {
            Ok(core::StreamOptions {
                stop: core::StopSet::new(stop)?.map(Arc::new),
                stop_regex: core::StopRegex::new(stop_regex)?.map(Arc::new),
                skip_special,
                include_stop,
            })
        };
        let inner = py.detach(compile).map_err(to_py_error)?;
        Ok(Self { inner })
    }
}

/// Incremental decoding of many streams.
#[pyclass(frozen, module = "dsserve._native")]
pub struct StreamDecoder {
    table: Mutex<core::StreamTable>,
    /// Memory of the last batch, for the next one.
    spare: Mutex<Batch>,
}

/// One call's arguments and results.
#[derive(Default)]
struct Batch {
    names: Vec<u64>,
    offsets: Vec<u32>,
    ids: Vec<u32>,
    ends: Vec<core::StreamEnd>,
    pieces: core::Pieces,
}

impl Batch {
    fn read(
        &mut self,
        names: &[u8],
        offsets: &[u8],
        ids: &[u8],
        ends: Option<&[u8]>,
    ) -> PyResult<()> {
        parse_u64("names", names, &mut self.names)?;
        parse_u32("offsets", offsets, &mut self.offsets)?;
        parse_u32("ids", ids, &mut self.ids)?;
        self.ends.clear();
        let ends = ends.unwrap_or_default().iter();
        self.ends.extend(ends.map(|&code| stream_end(code)));
        Ok(())
    }

    /// Pushes to the streams and forgets those that ended; returns the stops that were found.
    fn push(&mut self, table: &mut core::StreamTable) -> PyResult<HashMap<usize, String>> {
        let batch = core::TokenBatch {
            names: &self.names,
            offsets: &self.offsets,
            ids: &self.ids,
            ends: &self.ends,
        };
        table
            .push_into(batch, &mut self.pieces)
            .map_err(to_py_error)?;
        let mut stops = HashMap::new();
        for (index, (piece, &name)) in self.pieces.iter().zip(&self.names).enumerate() {
            if piece.is_some_and(|piece| piece.stop.is_some()) {
                let stop = table.stop_text(name).unwrap_or_default();
                stops.insert(index, stop.to_owned());
            }
        }
        for (&name, &end) in self.names.iter().zip(&self.ends) {
            if end != core::StreamEnd::Open {
                table.close(name);
            }
        }
        Ok(stops)
    }

    fn counts(&self, count: fn(core::PieceRef<'_>) -> u32) -> Vec<u32> {
        let pieces = self.pieces.iter();
        pieces.map(|piece| piece.map_or(0, count)).collect()
    }
}

#[pymethods]
impl StreamDecoder {
    #[new]
    fn new(tokenizer: &Tokenizer) -> Self {
        let table = core::StreamTable::new(Arc::clone(tokenizer.table()));
        Self {
            table: Mutex::new(table),
            spare: Mutex::default(),
        }
    }

    /// Starts a stream; without options nothing stops it and special tokens have no text.
    #[pyo3(signature = (name, options = None))]
    fn open(&self, name: u64, options: Option<&StreamOptions>) -> PyResult<()> {
        let options = match options {
            Some(options) => options.inner.clone(),
            None => core::StreamOptions {
                skip_special: true,
                ..core::StreamOptions::default()
            },
        };
        self.lock()?.open(name, options).map_err(to_py_error)
    }

    /// New ids of many streams: u64 names, u32 offsets (one more than names), u32 ids; `ends` has a
    /// byte a stream: 0 goes on, 1 ended with a stop token, others ended.
    #[pyo3(signature = (names, offsets, ids, ends = None))]
    fn push_batch(
        &self,
        py: Python<'_>,
        names: &[u8],
        offsets: &[u8],
        ids: &[u8],
        ends: Option<&[u8]>,
    ) -> PyResult<StepPieces> {
        let mut batch = std::mem::take(&mut *lock(&self.spare)?);
        batch.read(names, offsets, ids, ends)?;
        // The table is locked and unlocked inside, so nobody waits for it with the interpreter lock
        // held while its owner waits for the interpreter lock.
        let mut push = || batch.push(&mut *self.lock()?);
        let is_short = ids.len() < DETACH_IDS * 4 && !self.lock()?.has_patterns();
        let stops = if is_short { push()? } else { py.detach(push)? };
        let texts = batch.pieces.iter();
        let texts = texts.map(|piece| piece.map(|piece| piece.text));
        let pieces = StepPieces {
            texts: PyList::new(py, texts)?.unbind(),
            stops,
            kept_tokens: batch.counts(|piece| piece.kept_tokens),
            emitted_tokens: batch.counts(|piece| piece.emitted_tokens),
        };
        *lock(&self.spare)? = batch;
        Ok(pieces)
    }

    /// Ends and forgets a stream; returns what it held back.
    fn finish(&self, name: u64) -> PyResult<Piece> {
        let mut table = self.lock()?;
        let piece = table.finish(name).map_err(to_py_error)?;
        let stop = table.stop_text(name).map(str::to_owned);
        table.close(name);
        Ok(Piece {
            text: piece.text,
            stop,
            kept_tokens: piece.kept_tokens,
            emitted_tokens: piece.emitted_tokens,
        })
    }

    /// Forgets a stream; False if there was none.
    fn close(&self, name: u64) -> PyResult<bool> {
        Ok(self.lock()?.close(name))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.lock()?.len())
    }
}

impl StreamDecoder {
    fn lock(&self) -> PyResult<MutexGuard<'_, core::StreamTable>> {
        lock(&self.table)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> PyResult<MutexGuard<'_, T>> {
    mutex
        .lock()
        .map_err(|_| PyRuntimeError::new_err("the stream table was left broken by a panic"))
}

/// Places the ids of one stream in its text.
#[pyclass(module = "dsserve._native")]
pub struct TokenAligner {
    inner: core::TokenAligner,
}

#[pymethods]
impl TokenAligner {
    #[new]
    #[pyo3(signature = (tokenizer, skip_special = true))]
    fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let table = Arc::clone(tokenizer.table());
        Self {
            inner: core::TokenAligner::new(table, skip_special),
        }
    }

    /// (start byte, end byte, characters before) of each id (u32 little-endian).
    fn push(&mut self, ids: &[u8]) -> PyResult<Vec<(u64, u64, u64)>> {
        let ids = read_u32("ids", ids)?;
        let tokens = self.inner.push(&ids);
        let places = tokens
            .into_iter()
            .map(|token| (token.text.start, token.text.end, token.first_char));
        Ok(places.collect())
    }

    /// The bytes that an incomplete character at the end takes: (start, end).
    fn finish(&mut self) -> (u64, u64) {
        let tail = self.inner.finish();
        (tail.start, tail.end)
    }
}

/// What a finish code of the engine means for a stream; those numbers are the protocol's.
fn stream_end(code: u8) -> core::StreamEnd {
    match code {
        0 => core::StreamEnd::Open,
        1 => core::StreamEnd::StopToken,
        _ => core::StreamEnd::Ended,
    }
}
