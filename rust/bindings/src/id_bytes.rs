//! Ids and names as little-endian bytes: how arrays of them cross from and to Python.

use crate::tokenizer::TokenizerError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Little-endian bytes of `ids`, written in place.
pub(crate) fn to_py_bytes<'py>(py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, ids.len() * 4, |bytes| {
        for (target, id) in bytes.chunks_exact_mut(4).zip(ids) {
            target.copy_from_slice(&id.to_le_bytes());
        }
        Ok(())
    })
}

pub(crate) fn read_u32(name: &str, bytes: &[u8]) -> PyResult<Vec<u32>> {
    let mut numbers = Vec::new();
    parse_u32(name, bytes, &mut numbers)?;
    Ok(numbers)
}

/// Overwrites `numbers`.
pub(crate) fn parse_u32(name: &str, bytes: &[u8], numbers: &mut Vec<u32>) -> PyResult<()> {
    let chunks = bytes.chunks_exact(4);
    if !chunks.remainder().is_empty() {
        return Err(bad_length(name, 4, bytes.len()));
    }
    numbers.clear();
    numbers.extend(chunks.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    Ok(())
}

/// Overwrites `numbers`.
pub(crate) fn parse_u64(name: &str, bytes: &[u8], numbers: &mut Vec<u64>) -> PyResult<()> {
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
