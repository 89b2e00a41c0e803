#![doc = include_str!("../README.md")]

mod align;
mod batch;
mod decode;
mod encode;
mod error;
mod fast;
mod load;
mod matcher;
mod message_cache;
mod options;
mod parts;
mod progress;
mod reference;
mod split;
mod stop;
mod stop_cost;
mod stop_machine;
mod stop_regex;
#[doc(hidden)]
pub mod testing;
mod threads;
mod utf8;
mod vocab;

pub use align::{AlignedToken, TokenAligner};
pub use batch::{PieceRef, Pieces, StreamEnd, StreamTable, TokenBatch};
pub use decode::{Piece, StreamOptions, TextStream};
pub use encode::Tokenizer;
pub use error::TokenizerError;
pub use matcher::Stop;
pub use message_cache::CacheStats;
pub use options::{Backend, TokenizerOptions};
pub use stop::{StopSet, MAX_STOP_BYTES};
pub use stop_regex::{
    StopRegex, MAX_HELD_REGEX_BYTES, MAX_STOP_REGEX_BYTES, MAX_STOP_REGEX_TOTAL_BYTES,
};
pub use threads::PARALLEL_TEXT_BYTES;
pub use vocab::TokenTable;
