//! Text and token bridge of the dsserve engine.
//!
//! [`Tokenizer`] turns texts into ids on its own threads, [`TextStream`] turns the ids of one
//! generation into text as they come, looking for stop strings, and [`StreamTable`] holds many such
//! streams. Everything works on byte-level tokenizers (`tokenizer.json`); no Python here.

mod batch;
mod decode;
mod encode;
mod error;
mod fast;
mod load;
mod message_cache;
mod options;
mod parts;
mod reference;
mod split;
mod stop;
mod threads;
mod vocab;

pub use batch::{StreamTable, TokenBatch};
pub use decode::{Piece, StreamOptions, TextStream};
pub use encode::Tokenizer;
pub use error::TokenizerError;
pub use message_cache::CacheStats;
pub use options::{Backend, TokenizerOptions};
pub use stop::{StopSet, MAX_STOP_BYTES};
pub use threads::PARALLEL_TEXT_BYTES;
pub use vocab::TokenTable;
