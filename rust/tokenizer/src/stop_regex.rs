//! Stop patterns: regular expressions over a stream, in time linear in it.
//!
//! All patterns are one automaton that is walked a byte at a time (`stop_machine`). A walk remembers where in the text
//! it began, so that the text before a match is known when the match is complete, and so that text is
//! held back exactly as long as a match may have begun there.

use crate::error::TokenizerError;
use crate::stop_cost::{num_large_classes, num_positions};
use crate::stop_machine::Machine;
use regex_automata::nfa::thompson::{self, WhichCaptures, NFA};
use regex_syntax::ast::parse::Parser;
use regex_syntax::hir::translate::Translator;
use regex_syntax::hir::{Hir, LookSet};

/// Limit on the length of a stop pattern.
pub const MAX_STOP_REGEX_BYTES: usize = 1024;

/// Limit on the length of all stop patterns of a stream together.
pub const MAX_STOP_REGEX_TOTAL_BYTES: usize = 4 * 1024;

/// Text in which an unfinished match of a stop pattern began is held back up to this much.
pub const MAX_HELD_REGEX_BYTES: usize = 4096;

/// Limit on the classes of a stream's patterns that take long to build, up to a millisecond each.
const MAX_LARGE_CLASSES: usize = 64;

/// Limit on the characters of a stream's patterns, repetitions written out; it bounds the walks and so
/// the work for a byte.
const MAX_POSITIONS: u64 = 1024;

/// Limit on the automaton of a stream's patterns.
const MAX_AUTOMATON_BYTES: usize = 1024 * 1024;

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
    machine: Machine,
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
        let mut budget = Budget::default();
        let mut parsed = Vec::with_capacity(patterns.len());
        for (index, pattern) in patterns.iter().enumerate() {
            let hir = budget
                .parse(pattern)
                .map_err(|reason| TokenizerError::StopRegex { index, reason })?;
            parsed.push(hir);
        }
        if let Some(nfa) = build(&parsed) {
            let machine = Machine::new(&nfa);
            return Ok(Some(Self { patterns, machine }));
        }
        let is_too_large = |count: &usize| build(&parsed[..*count]).is_none();
        let count = (1..parsed.len()).find(is_too_large);
        Err(TokenizerError::StopRegex {
            index: count.unwrap_or(parsed.len()) - 1,
            reason: too_large(&format!(
                "its automaton needs more than {MAX_AUTOMATON_BYTES} bytes"
            )),
        })
    }

    /// The patterns, in the order given.
    #[must_use]
    pub fn patterns(&self) -> &[String] {
        &self.patterns
    }

    /// What finds them in a stream.
    pub(crate) fn machine(&self) -> &Machine {
        &self.machine
    }
}

/// What the patterns of a stream took so far.
#[derive(Debug, Default)]
struct Budget {
    bytes: usize,
    large_classes: usize,
    positions: u64,
}

impl Budget {
    /// Parses the next pattern; the error says why it cannot be used. What could be expensive is
    /// counted before it is done.
    fn parse(&mut self, pattern: &str) -> Result<Hir, String> {
        if pattern.len() > MAX_STOP_REGEX_BYTES {
            return Err(format!(
                "it has {} bytes, the limit is {MAX_STOP_REGEX_BYTES}",
                pattern.len()
            ));
        }
        self.bytes += pattern.len();
        if self.bytes > MAX_STOP_REGEX_TOTAL_BYTES {
            return Err(too_large(&format!(
                "more than {MAX_STOP_REGEX_TOTAL_BYTES} bytes"
            )));
        }
        let tree = Parser::new()
            .parse(pattern)
            .map_err(|error| one_line(&error.to_string()))?;
        self.large_classes += num_large_classes(&tree);
        if self.large_classes > MAX_LARGE_CLASSES {
            return Err(too_large(&format!(
                "more than {MAX_LARGE_CLASSES} large character classes"
            )));
        }
        let hir = Translator::new()
            .translate(pattern, &tree)
            .map_err(|error| one_line(&error.to_string()))?;
        let known = LookSet::empty()
            .insert(regex_syntax::hir::Look::Start)
            .insert(regex_syntax::hir::Look::StartLF);
        let looks = hir.properties().look_set();
        if looks.union(known) != known {
            return Err(
                "it looks at what follows ($, \\b, \\B): only ^ works in a stream".to_owned(),
            );
        }
        if hir.properties().minimum_len() == Some(0) {
            return Err("it matches the empty text".to_owned());
        }
        self.positions = self.positions.saturating_add(num_positions(&hir));
        if self.positions > MAX_POSITIONS {
            return Err(too_large(&format!(
                "more than {MAX_POSITIONS} characters with repetitions written out"
            )));
        }
        Ok(hir)
    }
}

/// None if the automaton is too large: nothing else can be wrong with parsed patterns.
fn build(patterns: &[Hir]) -> Option<NFA> {
    let config = thompson::Config::new()
        .which_captures(WhichCaptures::None)
        .nfa_size_limit(Some(MAX_AUTOMATON_BYTES));
    NFA::compiler()
        .configure(config)
        .build_many_from_hir(patterns)
        .ok()
}

/// The limits are those of all patterns of a stream; the one that goes beyond them is told.
fn too_large(reason: &str) -> String {
    format!("it is too large, with those before it: {reason}")
}

/// The message of the parser without its drawing of where the error is.
fn one_line(message: &str) -> String {
    let line = message.lines().rfind(|line| !line.trim().is_empty());
    line.unwrap_or_default()
        .trim_start_matches("error: ")
        .to_owned()
}
