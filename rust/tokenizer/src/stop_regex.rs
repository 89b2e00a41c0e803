//! Stop patterns: regular expressions over a stream, in time linear in it.
//!
//! All patterns are one automaton that is walked a byte at a time. A walk remembers where in the text
//! it began, so that the text before a match is known when the match is complete, and so that text is
//! held back exactly as long as a match may have begun there.

use crate::error::TokenizerError;
use regex_automata::nfa::thompson::{self, State, WhichCaptures, NFA};
use regex_automata::util::look::Look;
use regex_automata::util::primitives::StateID;
use regex_syntax::hir::LookSet;

/// Limit on the length of a stop pattern.
pub const MAX_STOP_REGEX_BYTES: usize = 1024;

/// Text in which an unfinished match of a stop pattern began is held back up to this much.
pub const MAX_HELD_REGEX_BYTES: usize = 4096;

/// Limit on the automaton of a stream's patterns; it bounds the work for a byte.
const MAX_AUTOMATON_BYTES: usize = 256 * 1024;

/// The compiled stop patterns of a stream; several streams may share one.
///
/// ```
/// use dsserve_tokenizer::StopRegex;
///
/// # fn main() -> Result<(), dsserve_tokenizer::TokenizerError> {
/// assert!(StopRegex::new(vec![r"\n[0-9]+\.".to_owned()])?.is_some());
/// let error = StopRegex::new(vec!["end$".to_owned()]).expect_err("$ looks ahead");
/// assert!(error.to_string().contains("stop pattern 0"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct StopRegex {
    patterns: Vec<String>,
    nfa: NFA,
}

/// Where a match ends in the fed text, and where it began in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegexHit {
    /// Index of the pattern.
    pub pattern: usize,
    /// Offset of the match in the stream.
    pub start: u64,
    /// Offset just after it, in the text of this call.
    pub end: usize,
}

/// The walks of one stream.
#[derive(Debug, Clone, Default)]
pub(crate) struct RegexState {
    /// Bytes fed so far.
    num_bytes: u64,
    last_byte: Option<u8>,
    /// The state of each walk and where it began, the earliest first; no state twice.
    walks: Vec<(StateID, u64)>,
    /// Memory used again for each byte.
    next: Vec<(StateID, u64)>,
    stack: Vec<StateID>,
    /// The round in which a state was last entered.
    entered: Vec<u64>,
    round: u64,
}

impl StopRegex {
    /// Compiles `patterns`; None if there are none.
    ///
    /// A pattern stops a stream at the first place where a match of it is complete, so a repetition
    /// at its end takes as little as it may.
    ///
    /// # Errors
    /// [`TokenizerError::StopRegex`] for a pattern that is no regular expression, is too long or too
    /// large, matches the empty text, or looks at what follows (`$`, `\b`, look-around): the text
    /// comes in pieces, and what follows is not known when a piece is given out.
    pub fn new(patterns: Vec<String>) -> Result<Option<Self>, TokenizerError> {
        if patterns.is_empty() {
            return Ok(None);
        }
        for (index, pattern) in patterns.iter().enumerate() {
            check(pattern).map_err(|reason| TokenizerError::StopRegex { index, reason })?;
        }
        let config = thompson::Config::new()
            .which_captures(WhichCaptures::None)
            .nfa_size_limit(Some(MAX_AUTOMATON_BYTES));
        let nfa = NFA::compiler()
            .configure(config)
            .build_many(&patterns)
            .map_err(|error| TokenizerError::StopRegex {
                index: 0,
                reason: format!("the patterns are too large together: {error}"),
            })?;
        Ok(Some(Self { patterns, nfa }))
    }

    /// The patterns, in the order given.
    #[must_use]
    pub fn patterns(&self) -> &[String] {
        &self.patterns
    }

    pub(crate) fn start(&self) -> RegexState {
        RegexState {
            entered: vec![0; self.nfa.states().len()],
            ..RegexState::default()
        }
    }

    /// Feeds `text`, moving `state`; stops where the first match is complete. If several end there,
    /// the one that began first is reported.
    pub(crate) fn feed(&self, state: &mut RegexState, text: &[u8]) -> Option<RegexHit> {
        for (index, &byte) in text.iter().enumerate() {
            if let Some((pattern, start)) = self.step(state, byte) {
                return Some(RegexHit {
                    pattern,
                    start,
                    end: index + 1,
                });
            }
        }
        None
    }

    /// Moves every walk by one byte; returns the match that it completes.
    fn step(&self, state: &mut RegexState, byte: u8) -> Option<(usize, u64)> {
        // Matches begin between characters.
        let is_boundary = byte & 0xC0 != 0x80;
        state.round += 1;
        if is_boundary {
            for &(walk, _) in &state.walks {
                state.entered[walk.as_usize()] = state.round;
            }
            let mut walks = std::mem::take(&mut state.walks);
            // No pattern matches the empty text, so this completes nothing.
            self.enter(
                state,
                &mut walks,
                self.nfa.start_anchored(),
                state.num_bytes,
            );
            state.walks = walks;
            state.round += 1;
        }
        state.num_bytes += 1;
        state.last_byte = Some(byte);
        let mut next = std::mem::take(&mut state.next);
        next.clear();
        let mut hit = None;
        for index in 0..state.walks.len() {
            let (walk, start) = state.walks[index];
            let Some(target) = self.target(walk, byte) else {
                continue;
            };
            let found = self.enter(state, &mut next, target, start);
            hit = hit.or(found.map(|pattern| (pattern, start)));
        }
        state.next = std::mem::replace(&mut state.walks, next);
        hit
    }

    fn target(&self, walk: StateID, byte: u8) -> Option<StateID> {
        match self.nfa.state(walk) {
            State::ByteRange { trans } if trans.matches_byte(byte) => Some(trans.next),
            State::Sparse(transitions) => transitions.matches_byte(byte),
            State::Dense(transitions) => transitions.matches_byte(byte),
            _ => None,
        }
    }

    /// Adds the states that `first` leads to without a byte; returns the first pattern complete there.
    fn enter(
        &self,
        state: &mut RegexState,
        walks: &mut Vec<(StateID, u64)>,
        first: StateID,
        start: u64,
    ) -> Option<usize> {
        let mut found: Option<usize> = None;
        state.stack.clear();
        state.stack.push(first);
        while let Some(id) = state.stack.pop() {
            if std::mem::replace(&mut state.entered[id.as_usize()], state.round) == state.round {
                continue;
            }
            match self.nfa.state(id) {
                State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) => {
                    walks.push((id, start));
                }
                State::Look { look, next } => {
                    if looks_back(*look, state.num_bytes, state.last_byte) {
                        state.stack.push(*next);
                    }
                }
                State::Union { alternates } => state.stack.extend(alternates.iter().rev()),
                State::BinaryUnion { alt1, alt2 } => state.stack.extend([*alt2, *alt1]),
                State::Capture { next, .. } => state.stack.push(*next),
                State::Match { pattern_id } => {
                    let pattern = pattern_id.as_usize();
                    found = Some(found.map_or(pattern, |other| other.min(pattern)));
                }
                State::Fail => {}
            }
        }
        found
    }
}

impl RegexState {
    /// How many bytes at the end of the text fed so far an unfinished match may hold.
    pub(crate) fn held_len(&self) -> usize {
        let earliest = self
            .walks
            .first()
            .map_or(self.num_bytes, |&(_, start)| start);
        usize::try_from(self.num_bytes - earliest).unwrap_or(usize::MAX)
    }
}

fn looks_back(look: Look, at: u64, last_byte: Option<u8>) -> bool {
    match look {
        Look::Start => at == 0,
        Look::StartLF => at == 0 || last_byte == Some(b'\n'),
        // Others are refused when the pattern is compiled.
        _ => false,
    }
}

fn check(pattern: &str) -> Result<(), String> {
    if pattern.len() > MAX_STOP_REGEX_BYTES {
        return Err(format!(
            "it has {} bytes, the limit is {MAX_STOP_REGEX_BYTES}",
            pattern.len()
        ));
    }
    let hir = regex_syntax::parse(pattern).map_err(|error| one_line(&error.to_string()))?;
    let known = LookSet::empty()
        .insert(regex_syntax::hir::Look::Start)
        .insert(regex_syntax::hir::Look::StartLF);
    let looks = hir.properties().look_set();
    if looks.union(known) != known {
        return Err("it looks at what follows ($, \\b, \\B): only ^ works in a stream".to_owned());
    }
    if hir.properties().minimum_len() == Some(0) {
        return Err("it matches the empty text".to_owned());
    }
    Ok(())
}

/// The message of the parser without its drawing of where the error is.
fn one_line(message: &str) -> String {
    let line = message.lines().rfind(|line| !line.trim().is_empty());
    line.unwrap_or_default()
        .trim_start_matches("error: ")
        .to_owned()
}
