//! Fuzz targets: bytes to a sequence of calls, and what must hold after each of them.
//!
//! Every module has `run(data)`, which panics where something is wrong. The binaries of `cargo fuzz` and
//! the plain driver `smoke` share them.

pub mod bytes;
pub mod encode;
pub mod radix_ops;
pub mod scheduler_events;
pub mod stream_decode;

/// A target by its name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 4] = [
    ("radix_ops", radix_ops::run),
    ("scheduler_events", scheduler_events::run),
    ("stream_decode", stream_decode::run),
    ("encode", encode::run),
];
