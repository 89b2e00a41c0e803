//! The Python class `Tokenizer` over the one of the tokenizer crate.

use crate::id_bytes::{read_u32, to_py_bytes};
use dsserve_tokenizer as core;
use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyBytes;
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

create_exception!(
    dsserve._native,
    TokenizerError,
    PyValueError,
    "A tokenizer cannot be loaded, or a call has wrong arguments."
);

/// Decoding this many ids takes about the 20 us above which the interpreter lock is released.
pub(crate) const DETACH_IDS: usize = 512;

/// A byte-level tokenizer with its own threads.
#[pyclass(frozen, module = "dsserve._native")]
pub struct Tokenizer {
    inner: Arc<core::Tokenizer>,
}

impl Tokenizer {
    /// The bytes of every id.
    pub(crate) fn table(&self) -> &Arc<core::TokenTable> {
        self.inner.table()
    }
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

#[expect(
    clippy::needless_pass_by_value,
    reason = "used as a function of map_err"
)]
pub(crate) fn to_py_error(error: core::TokenizerError) -> PyErr {
    TokenizerError::new_err(error.to_string())
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
