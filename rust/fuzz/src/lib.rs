//! Fuzz targets: bytes to a sequence of calls, and what must hold after each of them.
//!
//! Every module has `run(data)`, which panics where something is wrong. The binaries of `cargo fuzz` and
//! the plain driver `smoke` share them.

pub mod bytes;
pub mod encode;
pub mod radix_ops;
pub mod scheduler_events;
pub mod stream_decode;

/// The models that the crates' property tests compare with.
#[path = "../../radix_cache/tests/common/mod.rs"]
pub mod radix_model;
#[path = "../../scheduler/tests/common/mod.rs"]
pub mod scheduler_model;

/// A target by its name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 4] = [
    ("radix_ops", radix_ops::run),
    ("scheduler_events", scheduler_events::run),
    ("stream_decode", stream_decode::run),
    ("encode", encode::run),
];
