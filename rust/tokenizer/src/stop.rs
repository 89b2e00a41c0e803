//! Stop strings: all patterns of a stream at once, a byte at a time.

use crate::error::TokenizerError;
use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::noncontiguous::{Builder, NFA};
use aho_corasick::{Anchored, MatchKind};

/// Limit on the length of all stop strings of a stream together.
pub const MAX_STOP_BYTES: usize = 64 * 1024;

/// The compiled stop strings of a stream; several streams may share one.
///
/// ```
/// use dsserve_tokenizer::StopSet;
///
/// # fn main() -> Result<(), dsserve_tokenizer::TokenizerError> {
/// let stop = StopSet::new(vec!["\n\n".to_owned(), "END".to_owned()])?;
/// assert!(stop.is_some());
/// assert!(StopSet::new(vec![String::new()]).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct StopSet {
    patterns: Vec<String>,
    automaton: NFA,
    start: StateID,
    /// How many bytes of text each state, by its number, remembers: the longest end that may begin a
    /// pattern.
    depths: Vec<u32>,
}

/// Where a stop string ends in the fed text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hit {
    /// Index of the pattern.
    pub pattern: usize,
    /// Offset just after it, in the text of this call.
    pub end: usize,
}

impl StopSet {
    /// Compiles `patterns`; None if there are none.
    ///
    /// # Errors
    /// [`TokenizerError::StopEmpty`], [`TokenizerError::StopTooLong`]; [`TokenizerError::StopCompile`]
    /// cannot happen below that limit.
    pub fn new(patterns: Vec<String>) -> Result<Option<Self>, TokenizerError> {
        if patterns.is_empty() {
            return Ok(None);
        }
        if let Some(index) = patterns.iter().position(String::is_empty) {
            return Err(TokenizerError::StopEmpty { index });
        }
        let bytes = patterns.iter().map(String::len).sum();
        if bytes > MAX_STOP_BYTES {
            return Err(TokenizerError::StopTooLong {
                bytes,
                limit: MAX_STOP_BYTES,
            });
        }
        let automaton = Builder::new()
            .match_kind(MatchKind::Standard)
            .prefilter(false)
            .build(&patterns)
            .map_err(|error| TokenizerError::StopCompile {
                reason: error.to_string(),
            })?;
        let start =
            automaton
                .start_state(Anchored::No)
                .map_err(|error| TokenizerError::StopCompile {
                    reason: error.to_string(),
                })?;
        let mut depths = vec![0; start.as_usize() + 1];
        for pattern in &patterns {
            let mut state = start;
            for (depth, &byte) in (1..).zip(pattern.as_bytes()) {
                // Reading a pattern from the start walks down the trie: depth = bytes read.
                state = automaton.next_state(Anchored::No, state, byte);
                if depths.len() <= state.as_usize() {
                    depths.resize(state.as_usize() + 1, 0);
                }
                depths[state.as_usize()] = depth;
            }
        }
        Ok(Some(Self {
            patterns,
            automaton,
            start,
            depths,
        }))
    }

    /// The stop strings, in the order given.
    #[must_use]
    pub fn patterns(&self) -> &[String] {
        &self.patterns
    }

    pub(crate) fn start(&self) -> StateID {
        self.start
    }

    /// Feeds `text`, moving `state`; stops at the first position where a pattern is complete. If
    /// several end there, the longest (the one that began first) is reported.
    pub(crate) fn feed(&self, state: &mut StateID, text: &[u8]) -> Option<Hit> {
        for (index, &byte) in text.iter().enumerate() {
            *state = self.automaton.next_state(Anchored::No, *state, byte);
            if self.automaton.is_match(*state) {
                let pattern = (0..self.automaton.match_len(*state))
                    .map(|i| self.automaton.match_pattern(*state, i).as_usize())
                    .max_by_key(|&pattern| (self.patterns[pattern].len(), usize::MAX - pattern))?;
                return Some(Hit {
                    pattern,
                    end: index + 1,
                });
            }
        }
        None
    }

    /// How many bytes at the end of the text fed so far may be the beginning of a pattern.
    pub(crate) fn held_len(&self, state: StateID) -> usize {
        // Every reachable state is a prefix of a pattern.
        self.depths[state.as_usize()] as usize
    }
}
