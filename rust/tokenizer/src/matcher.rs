//! Everything that may stop a stream, looked for together.

use crate::stop::{Hit, StopSet};
use crate::stop_machine::{RegexHit, RegexState};
use crate::stop_regex::{StopRegex, MAX_HELD_REGEX_BYTES};
use aho_corasick::automaton::StateID;
use std::sync::Arc;

/// What stopped a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// The stop string with this index.
    String(usize),
    /// The stop pattern with this index.
    Regex(usize),
}

/// A stop in the text of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub stop: Stop,
    /// Offset just after it, in the text of this call.
    pub end: usize,
    /// Its length; it may have begun in earlier calls.
    pub len: usize,
}

/// The stop strings and patterns of one stream, and how far it matches them.
#[derive(Debug)]
pub(crate) struct Matcher {
    strings: Option<(Arc<StopSet>, StateID)>,
    regex: Option<(Arc<StopRegex>, RegexState)>,
}

impl Matcher {
    /// None if there is nothing to look for.
    pub(crate) fn new(
        strings: Option<Arc<StopSet>>,
        regex: Option<Arc<StopRegex>>,
    ) -> Option<Self> {
        if strings.is_none() && regex.is_none() {
            return None;
        }
        Some(Self {
            strings: strings.map(|strings| {
                let start = strings.start();
                (strings, start)
            }),
            regex: regex.map(|regex| (regex, RegexState::default())),
        })
    }

    /// Feeds `text`; reports what is complete first, of several the one that began first, of equal
    /// ones the stop string.
    pub(crate) fn feed(&mut self, text: &[u8]) -> Option<Found> {
        let string = self.strings.as_mut().and_then(|(strings, state)| {
            let Hit { pattern, end } = strings.feed(state, text)?;
            Some(Found {
                stop: Stop::String(pattern),
                end,
                len: strings.patterns()[pattern].len(),
            })
        });
        let regex = self.regex.as_mut().and_then(|(regex, state)| {
            let RegexHit { pattern, len, end } = regex.machine().feed(state, text)?;
            Some(Found {
                stop: Stop::Regex(pattern),
                end,
                len,
            })
        });
        string
            .into_iter()
            .chain(regex)
            .min_by_key(|found| (found.end, usize::MAX - found.len))
    }

    /// How many bytes at the end of the text fed so far may be the beginning of a stop.
    pub(crate) fn held_len(&self) -> usize {
        let strings = self.strings.as_ref();
        let strings = strings.map_or(0, |(strings, state)| strings.held_len(*state));
        let regex = self.regex.as_ref();
        let regex = regex.map_or(0, |(_, state)| state.held_len().min(MAX_HELD_REGEX_BYTES));
        strings.max(regex)
    }

    /// The stop string or the pattern.
    pub(crate) fn text(&self, stop: Stop) -> Option<&str> {
        let (patterns, index) = match stop {
            Stop::String(index) => (self.strings.as_ref()?.0.patterns(), index),
            Stop::Regex(index) => (self.regex.as_ref()?.0.patterns(), index),
        };
        patterns.get(index).map(String::as_str)
    }
}
