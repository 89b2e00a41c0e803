//! Python classes over the tokenizer crate: `Tokenizer`, `StreamDecoder` and its `Piece`.

use dsserve_tokenizer as core;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
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
    #[pyo3(signature = (path, num_threads = 1))]
    fn new(py: Python<'_>, path: PathBuf, num_threads: usize) -> PyResult<Self> {
        let inner = py
            .detach(move || core::Tokenizer::from_path(&path, num_threads))
            .map_err(to_py_error)?;
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// One id array (u32 little-endian) per text.
    #[pyo3(signature = (texts, add_special = true))]
    fn encode_batch<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
        add_special: bool,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let inner = &self.inner;
        let batch = py
            .detach(move || inner.encode_batch(&texts, add_special))
            .map_err(to_py_error)?;
        Ok(batch
            .iter()
            .map(|ids| PyBytes::new(py, &to_bytes(ids)))
            .collect())
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
            .detach(move || inner.encode_rendered(prompt, &byte_ranges(prompt, special_ranges)))
            .map_err(to_py_error)?;
        Ok(PyBytes::new(py, &to_bytes(&ids)))
    }

    /// Text of `ids` (u32 little-endian); ids outside the vocabulary give none.
    #[pyo3(signature = (ids, skip_special = true))]
    fn decode(&self, py: Python<'_>, ids: &[u8], skip_special: bool) -> PyResult<String> {
        let ids = parse_u32("ids", ids)?;
        Ok(if ids.len() < DETACH_IDS {
            self.inner.decode(&ids, skip_special)
        } else {
            py.detach(|| self.inner.decode(&ids, skip_special))
        })
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

/// What a stream had to say after some ids.
#[pyclass(frozen, get_all, module = "dsserve._native")]
pub struct Piece {
    text: String,
    stop: Option<String>,
    kept_tokens: u32,
    emitted_tokens: u32,
}

/// Incremental decoding of many streams.
#[pyclass(frozen, module = "dsserve._native")]
pub struct StreamDecoder {
    table: Mutex<core::StreamTable>,
}

#[pymethods]
impl StreamDecoder {
    #[new]
    fn new(tokenizer: &Tokenizer) -> Self {
        let table = core::StreamTable::new(Arc::clone(tokenizer.inner.table()));
        Self {
            table: Mutex::new(table),
        }
    }

    #[pyo3(signature = (stop = Vec::new(), skip_special = true, include_stop = false))]
    fn open(&self, stop: Vec<String>, skip_special: bool, include_stop: bool) -> PyResult<u64> {
        let stop = core::StopSet::new(stop).map_err(to_py_error)?;
        let options = core::StreamOptions {
            stop: stop.map(Arc::new),
            skip_special,
            include_stop,
        };
        self.lock()?.open(options).map_err(to_py_error)
    }

    /// New ids of many streams: u64 handles, u32 offsets (one more than handles), u32 ids.
    fn push_batch(
        &self,
        py: Python<'_>,
        handles: &[u8],
        offsets: &[u8],
        ids: &[u8],
    ) -> PyResult<Vec<Piece>> {
        let handles = parse_u64("handles", handles)?;
        let offsets = parse_u32("offsets", offsets)?;
        let ids = parse_u32("ids", ids)?;
        // The table is locked and unlocked inside, so nobody waits for it with the interpreter lock
        // held while its owner waits for the interpreter lock.
        let push = || {
            let mut table = self.lock()?;
            let pieces = table
                .push(core::TokenBatch {
                    handles: &handles,
                    offsets: &offsets,
                    ids: &ids,
                })
                .map_err(to_py_error)?;
            handles
                .iter()
                .zip(pieces)
                .map(|(&handle, piece)| named_piece(&mut table, handle, piece))
                .collect()
        };
        if ids.len() < DETACH_IDS {
            push()
        } else {
            py.detach(push)
        }
    }

    /// Ends and forgets a stream; returns what it held back.
    fn finish(&self, handle: u64) -> PyResult<Piece> {
        let mut table = self.lock()?;
        let ended = table.finish(handle).map_err(to_py_error)?;
        let piece = named_piece(&mut table, handle, ended);
        table.close(handle);
        piece
    }

    /// Forgets a stream; False if there was none.
    fn close(&self, handle: u64) -> PyResult<bool> {
        Ok(self.lock()?.close(handle))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.lock()?.len())
    }
}

impl StreamDecoder {
    fn lock(&self) -> PyResult<MutexGuard<'_, core::StreamTable>> {
        self.table
            .lock()
            .map_err(|_| PyRuntimeError::new_err("the stream table was left broken by a panic"))
    }
}

fn named_piece(table: &mut core::StreamTable, handle: u64, piece: core::Piece) -> PyResult<Piece> {
    let stop = match piece.stop {
        Some(index) => {
            let pattern = table.stop_string(handle, index).map_err(to_py_error)?;
            Some(pattern.to_owned())
        }
        None => None,
    };
    Ok(Piece {
        text: piece.text,
        stop,
        kept_tokens: piece.kept_tokens,
        emitted_tokens: piece.emitted_tokens,
    })
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "used as a function of map_err"
)]
fn to_py_error(error: core::TokenizerError) -> PyErr {
    TokenizerError::new_err(error.to_string())
}

fn to_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn parse_u32(name: &str, bytes: &[u8]) -> PyResult<Vec<u32>> {
    let chunks = bytes.chunks_exact(4);
    if !chunks.remainder().is_empty() {
        return Err(bad_length(name, 4, bytes.len()));
    }
    Ok(chunks
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect())
}

fn parse_u64(name: &str, bytes: &[u8]) -> PyResult<Vec<u64>> {
    let chunks = bytes.chunks_exact(8);
    if !chunks.remainder().is_empty() {
        return Err(bad_length(name, 8, bytes.len()));
    }
    Ok(chunks
        .map(|b| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
        .collect())
}

fn bad_length(name: &str, item: usize, len: usize) -> PyErr {
    TokenizerError::new_err(format!("{name}: {len} bytes, not a multiple of {item}"))
}

/// Code point ranges to byte ranges; one past the end of `text` stays past its end.
fn byte_ranges(text: &str, ranges: Vec<(usize, usize)>) -> Vec<Range<usize>> {
    let mut starts: Vec<usize> = text.char_indices().map(|(start, _)| start).collect();
    starts.push(text.len());
    let byte_of = |index: usize| starts.get(index).copied().unwrap_or(text.len() + 1);
    ranges
        .into_iter()
        .map(|(start, end)| byte_of(start)..byte_of(end))
        .collect()
}
