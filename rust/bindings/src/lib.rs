//! The Python extension module `dsserve._native`: thin wrappers over the three library crates.
use pyo3::prelude::*;

#[pymodule]
mod _native {}
