//! Python classes over the tokenizer crate: `Tokenizer`, `StreamOptions`, `StreamDecoder` and what it
//! returns, `TokenAligner`.

use dsserve_tokenizer as core;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyList};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

create_exception!(
    dsserve._native,
    TokenizerError,
    PyValueError,
    "A tokenizer cannot be loaded, or a call has wrong arguments."
);

/// Decoding this many ids takes about the 20 us above which the interpreter lock is released.
const DETACH_IDS: usize = 512;

/// A byte-level tokenizer with its own threads.
#[pyclass(frozen, module = "dsserve._native")]
pub struct Tokenizer {
    inner: Arc<core::Tokenizer>,
}

#[pymethods]
impl Tokenizer {
    #[new]
    #[pyo3(signature = (path, num_threads = 1, *, backend = "auto", cache_bytes = 0))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        num_threads: usize,
        backend: &str,
        cache_bytes: usize,
    ) -> PyResult<Self> {
        let backend = match backend {
            "auto" => core::Backend::Auto,
            "huggingface" => core::Backend::HuggingFace,
            "fastokens" => core::Backend::Fast,
            other => {
                return Err(TokenizerError::new_err(format!(
                    "backend is {other:?}, not auto, huggingface or fastokens"
                )))
            }
        };
        let options = core::TokenizerOptions::default()
            .with_threads(num_threads)
            .with_backend(backend)
            .with_cache_bytes(cache_bytes);
        let inner = py
            .detach(move || core::Tokenizer::load(&path, &options))
            .map_err(to_py_error)?;
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// One id array (u32 little-endian) per text.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "extension functions own their lists"
    )]
    #[pyo3(signature = (texts, add_special = true))]
    fn encode_batch<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<PyBackedStr>,
        add_special: bool,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let inner = &self.inner;
        let batch = py
            .detach(|| inner.encode_batch(&texts, add_special))
            .map_err(to_py_error)?;
        batch.iter().map(|ids| to_py_bytes(py, ids)).collect()
    }

    /// Ids of a rendered prompt; `special_ranges` are code point offsets of its special tokens.
    fn encode_rendered<'py>(
        &self,
        py: Python<'py>,
        prompt: &str,
        special_ranges: Vec<(usize, usize)>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let inner = &self.inner;
        let ids = py
            .detach(move || inner.encode_rendered(prompt, &byte_ranges(prompt, &special_ranges)))
            .map_err(to_py_error)?;
        to_py_bytes(py, &ids)
    }

    /// The encoder in use.
    #[getter]
    fn backend(&self) -> &'static str {
        match self.inner.backend() {
            core::Backend::Fast => "fastokens",
            _ => "huggingface",
        }
    }

    #[getter]
    fn fallback_reason(&self) -> Option<&str> {
        self.inner.fallback_reason()
    }

    /// What the cache of encoded messages holds and did.
    fn cache_stats(&self) -> HashMap<&'static str, u64> {
        let stats = self.inner.cache_stats();
        HashMap::from([
            ("entries", stats.entries as u64),
            ("bytes", stats.bytes as u64),
            ("hits", stats.hits),
            ("misses", stats.misses),
        ])
    }

    /// Text of `ids` (u32 little-endian); ids outside the vocabulary give none.
    #[pyo3(signature = (ids, skip_special = true))]
    fn decode(&self, py: Python<'_>, ids: &[u8], skip_special: bool) -> PyResult<String> {
        let ids = read_u32("ids", ids)?;
        Ok(if ids.len() < DETACH_IDS {
            self.inner.decode(&ids, skip_special)
        } else {
            py.detach(|| self.inner.decode(&ids, skip_special))
        })
    }

    /// Text of each of `ids` (u32 little-endian) by itself.
    #[pyo3(signature = (ids, skip_special = true))]
    fn decode_each(&self, py: Python<'_>, ids: &[u8], skip_special: bool) -> PyResult<Vec<String>> {
        let ids = read_u32("ids", ids)?;
        let decode = |id: &u32| self.inner.decode(&[*id], skip_special);
        Ok(py.detach(|| ids.iter().map(decode).collect()))
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn added_token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.added_token_to_id(token)
    }

    /// The bytes that an id stands for, empty outside the vocabulary.
    fn token_bytes<'py>(&self, py: Python<'py>, id: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.inner.table().bytes(id))
    }

    #[getter]
    fn vocab_size(&self) -> usize {
        self.inner.table().len()
    }

    #[getter]
    fn special_ids(&self) -> Vec<u32> {
        self.inner.table().special_ids()
    }
}

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
        let table = core::StreamTable::new(Arc::clone(tokenizer.inner.table()));
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
        let table = Arc::clone(tokenizer.inner.table());
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

#[expect(
    clippy::needless_pass_by_value,
    reason = "used as a function of map_err"
)]
fn to_py_error(error: core::TokenizerError) -> PyErr {
    TokenizerError::new_err(error.to_string())
}

/// Little-endian bytes of `ids`, written in place.
fn to_py_bytes<'py>(py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, ids.len() * 4, |bytes| {
        for (target, id) in bytes.chunks_exact_mut(4).zip(ids) {
            target.copy_from_slice(&id.to_le_bytes());
        }
        Ok(())
    })
}

fn read_u32(name: &str, bytes: &[u8]) -> PyResult<Vec<u32>> {
    let mut numbers = Vec::new();
    parse_u32(name, bytes, &mut numbers)?;
    Ok(numbers)
}

/// Overwrites `numbers`.
fn parse_u32(name: &str, bytes: &[u8], numbers: &mut Vec<u32>) -> PyResult<()> {
    let chunks = bytes.chunks_exact(4);
    if !chunks.remainder().is_empty() {
        return Err(bad_length(name, 4, bytes.len()));
    }
    numbers.clear();
    numbers.extend(chunks.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    Ok(())
}

/// Overwrites `numbers`.
fn parse_u64(name: &str, bytes: &[u8], numbers: &mut Vec<u64>) -> PyResult<()> {
    let chunks = bytes.chunks_exact(8);
    if !chunks.remainder().is_empty() {
        return Err(bad_length(name, 8, bytes.len()));
    }
    numbers.clear();
    let number = |b: &[u8]| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
    numbers.extend(chunks.map(number));
    Ok(())
}

fn bad_length(name: &str, item: usize, len: usize) -> PyErr {
    TokenizerError::new_err(format!("{name}: {len} bytes, not a multiple of {item}"))
}

/// Code point ranges to byte ranges; one past the end of `text` stays past its end.
///
/// Walks the text once if the ranges ascend, as valid ones do.
fn byte_ranges(text: &str, ranges: &[(usize, usize)]) -> Vec<Range<usize>> {
    if text.is_ascii() {
        return ranges.iter().map(|&(start, end)| start..end).collect();
    }
    let mut last = (0, 0);
    let mut byte_of = |index: usize| {
        if index < last.0 {
            last = (0, 0);
        }
        let mut rest = text[last.1..].char_indices();
        let byte = match rest.nth(index - last.0) {
            Some((offset, _)) => last.1 + offset,
            // One past the last character is the end of the text; nothing is further.
            None if text[last.1..].chars().count() == index - last.0 => return text.len(),
            None => return text.len() + 1,
        };
        last = (index, byte);
        byte
    };
    ranges
        .iter()
        .map(|&(start, end)| byte_of(start)..byte_of(end))
        .collect()
}
