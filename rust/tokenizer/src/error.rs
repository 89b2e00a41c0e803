//! Everything that can go wrong in this crate.

use std::path::PathBuf;

/// Why a tokenizer could not be loaded or a call was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{path} is not a usable tokenizer: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The fast encoder was demanded for a file that it does not know.
    #[error("{path} cannot be encoded by the fast encoder: {reason}")]
    NotFast {
        /// The file.
        path: PathBuf,
        /// What about it is unknown.
        reason: String,
    },
    /// The threads of the encoder could not be started.
    #[error("cannot start {threads} tokenizer threads: {reason}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// A text could not be encoded.
    #[error("cannot encode a text of {bytes} bytes: {reason}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer said.
        reason: String,
    },
    /// A range of special text does not lie on character boundaries, in order, inside the prompt.
    #[error("special range {start}..{end} does not fit the prompt")]
    SpecialRange {
        /// First byte.
        start: usize,
        /// Byte after the last.
        end: usize,
    },
    /// A stop string is empty.
    #[error("stop string {index} is empty")]
    StopEmpty {
        /// Its position in the list.
        index: usize,
    },
    /// The stop strings of a stream are too long together.
    #[error("stop strings have {bytes} bytes together, the limit is {limit}")]
    StopTooLong {
        /// Sum of their lengths.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The stop strings could not be compiled.
    #[error("cannot compile the stop strings: {reason}")]
    StopCompile {
        /// What the automaton's builder said.
        reason: String,
    },
    /// A stop pattern cannot be used.
    #[error("stop pattern {index}: {reason}")]
    StopRegex {
        /// Its position in the list.
        index: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A name is that of no open stream.
    #[error("no stream with name {name}")]
    UnknownStream {
        /// The name.
        name: u64,
    },
    /// A stream cannot be opened under a name that another open stream has.
    #[error("a stream with name {name} is open already")]
    StreamInUse {
        /// The name.
        name: u64,
    },
    /// The offsets or ends of a batch do not fit its names or ids.
    #[error("batch of {names} streams and {ids} ids has bad offsets or ends")]
    BadOffsets {
        /// Number of names.
        names: usize,
        /// Number of ids.
        ids: usize,
    },
}
