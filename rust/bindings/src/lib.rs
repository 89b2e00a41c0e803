//! The Python extension module `dsserve._native`: thin wrappers over the three library crates.
use pyo3::prelude::*;

mod buffers;
mod errors;
mod id_bytes;
mod radix_cache;
mod request;
mod scheduler;
mod streams;
mod tokenizer;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::errors::{InvariantError, SchedulerError};
    #[pymodule_export]
    use super::radix_cache::{CacheError, CacheNamespace, CacheNode, CacheTails, RadixCache};
    #[pymodule_export]
    use super::scheduler::{Scheduler, StepOutputs, StepSummary};
    #[pymodule_export]
    use super::streams::{Piece, StepPieces, StreamDecoder, StreamOptions, TokenAligner};
    #[pymodule_export]
    use super::tokenizer::{Tokenizer, TokenizerError};
}
