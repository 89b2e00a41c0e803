//! The automaton of stop patterns, walked a byte at a time with where each walk began.

use regex_automata::nfa::thompson::{State, Transition, NFA};
use regex_automata::util::look::Look;
use regex_automata::util::primitives::StateID;
use std::cell::RefCell;

/// A compiled automaton: the states of an [`NFA`] laid out for walking.
#[derive(Debug)]
pub(crate) struct Machine {
    states: Vec<Node>,
    transitions: Vec<Range>,
    start: u32,
    /// The bytes that a match may begin with.
    is_first: [bool; 256],
}

/// A state. Walks stand on those that take a byte; the others lead on without one.
#[derive(Debug, Clone, Copy)]
enum Node {
    Byte(Range),
    /// Several ranges, ascending: so many of `transitions` from the first on.
    Bytes {
        first: u32,
        count: u32,
    },
    /// Two ways, the preferred one first.
    Fork(u32, u32),
    Look {
        look: Look,
        next: u32,
    },
    Match {
        pattern: u32,
    },
    Fail,
}

#[derive(Debug, Clone, Copy)]
struct Range {
    low: u8,
    high: u8,
    next: u32,
}

/// A match: which pattern, and how many bytes long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegexHit {
    /// Index of the pattern.
    pub pattern: usize,
    /// Its length; it may have begun in earlier calls.
    pub len: usize,
    /// Offset just after it, in the text of this call.
    pub end: usize,
}

/// The walks of one stream.
#[derive(Debug, Clone, Default)]
pub(crate) struct RegexState {
    /// Bytes fed so far; only differences matter, and no walk is 4 GiB long.
    num_bytes: u32,
    is_at_start: IsAtStart,
    /// The state of each walk and where it began, the earliest first; no state twice.
    walks: Vec<(u32, u32)>,
}

/// What stands before the next byte.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum IsAtStart {
    #[default]
    OfText,
    OfLine,
    No,
}

/// Memory used again for each call, of whatever stream: it is as large as an automaton.
#[derive(Debug, Default)]
struct Scratch {
    next: Vec<(u32, u32)>,
    stack: Vec<u32>,
    /// The round in which a state was last entered; no two rounds have the same number.
    entered: Vec<u64>,
    round: u64,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Machine {
    /// Lays out an automaton of patterns of which none matches the empty text.
    pub(crate) fn new(nfa: &NFA) -> Self {
        let mut machine = Self {
            states: Vec::with_capacity(nfa.states().len()),
            transitions: Vec::new(),
            start: id(nfa.start_anchored()),
            is_first: [false; 256],
        };
        for state in nfa.states() {
            let node = machine.node(state);
            machine.states.push(node);
        }
        // A state with more than two ways is a chain of forks; what it needs besides comes last.
        for (index, state) in nfa.states().iter().enumerate() {
            if let State::Union { alternates } = state {
                machine.states[index] = machine.chain(alternates);
            }
        }
        machine.is_first = machine.first_bytes();
        machine
    }

    fn node(&mut self, state: &State) -> Node {
        match state {
            State::ByteRange { trans } => Node::Byte(range(*trans)),
            State::Sparse(sparse) => self.bytes(sparse.transitions.iter().copied().map(range)),
            State::Dense(dense) => self.bytes((0..=u8::MAX).filter_map(|byte| {
                let next = id(dense.matches_byte(byte)?);
                Some(Range {
                    low: byte,
                    high: byte,
                    next,
                })
            })),
            // A union has its ways when all states have their places.
            State::Union { .. } | State::Fail => Node::Fail,
            State::BinaryUnion { alt1, alt2 } => Node::Fork(id(*alt1), id(*alt2)),
            State::Capture { next, .. } => Node::Fork(id(*next), id(*next)),
            State::Look { look, next } => Node::Look {
                look: *look,
                next: id(*next),
            },
            State::Match { pattern_id } => Node::Match {
                pattern: pattern_id.as_u32(),
            },
        }
    }

    fn bytes(&mut self, ranges: impl Iterator<Item = Range>) -> Node {
        let first = self.transitions.len();
        self.transitions.extend(ranges);
        Node::Bytes {
            first: to_u32(first),
            count: to_u32(self.transitions.len() - first),
        }
    }

    fn chain(&mut self, ways: &[StateID]) -> Node {
        match *ways {
            [] => Node::Fail,
            [only] => Node::Fork(id(only), id(only)),
            [first, second] => Node::Fork(id(first), id(second)),
            [first, ref rest @ ..] => {
                let rest = self.chain(rest);
                self.states.push(rest);
                Node::Fork(id(first), to_u32(self.states.len() - 1))
            }
        }
    }

    /// Whatever may be looked back at.
    fn first_bytes(&self) -> [bool; 256] {
        let mut is_first = [false; 256];
        let mut is_seen = vec![false; self.states.len()];
        let mut stack = vec![self.start];
        while let Some(at) = stack.pop() {
            if std::mem::replace(&mut is_seen[at as usize], true) {
                continue;
            }
            match self.states[at as usize] {
                Node::Byte(range) => mark(&mut is_first, &[range]),
                Node::Bytes { first, count } => mark(&mut is_first, self.ranges(first, count)),
                Node::Fork(one, other) => stack.extend([one, other]),
                Node::Look { next, .. } => stack.push(next),
                Node::Match { .. } | Node::Fail => {}
            }
        }
        is_first
    }

    fn ranges(&self, first: u32, count: u32) -> &[Range] {
        &self.transitions[first as usize..(first + count) as usize]
    }

    /// Feeds `text`, moving `state`; stops where the first match is complete. If several end there,
    /// the one that began first is reported.
    pub(crate) fn feed(&self, state: &mut RegexState, text: &[u8]) -> Option<RegexHit> {
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.begin(self, state);
            text.iter().enumerate().find_map(|(index, &byte)| {
                let (pattern, start) = self.step(state, scratch, byte)?;
                Some(RegexHit {
                    pattern: pattern as usize,
                    len: state.num_bytes.wrapping_sub(start) as usize,
                    end: index + 1,
                })
            })
        })
    }

    /// Moves every walk by one byte; returns the match that it completes, and where that began.
    fn step(&self, state: &mut RegexState, scratch: &mut Scratch, byte: u8) -> Option<(u32, u32)> {
        // Matches begin between characters. The states entered are those of this round still: where
        // a walk stands already, an earlier one goes on.
        if self.is_first[usize::from(byte)] && byte & 0xC0 != 0x80 {
            // No pattern matches the empty text, so this completes nothing.
            let place = (state.is_at_start, state.num_bytes);
            self.enter(place, scratch, &mut state.walks, self.start);
        }
        state.num_bytes = state.num_bytes.wrapping_add(1);
        state.is_at_start = if byte == b'\n' {
            IsAtStart::OfLine
        } else {
            IsAtStart::No
        };
        scratch.round += 1;
        if state.walks.is_empty() {
            return None;
        }
        let mut next = std::mem::take(&mut scratch.next);
        next.clear();
        let mut hit = None;
        for &(at, start) in &state.walks {
            let Some(target) = self.target(at, byte) else {
                continue;
            };
            let found = self.enter((state.is_at_start, start), scratch, &mut next, target);
            hit = hit.or(found.map(|pattern| (pattern, start)));
        }
        scratch.next = std::mem::replace(&mut state.walks, next);
        hit
    }

    fn target(&self, at: u32, byte: u8) -> Option<u32> {
        match self.states[at as usize] {
            Node::Byte(range) => range.takes(byte).then_some(range.next),
            Node::Bytes { first, count } => {
                let ranges = self.ranges(first, count);
                let index = ranges.partition_point(|range| range.high < byte);
                let range = ranges.get(index)?;
                range.takes(byte).then_some(range.next)
            }
            _ => None,
        }
    }

    /// Adds the states that `first` leads to without a byte, for the walk that began at `start`;
    /// returns the first pattern complete there.
    fn enter(
        &self,
        (is_at_start, start): (IsAtStart, u32),
        scratch: &mut Scratch,
        walks: &mut Vec<(u32, u32)>,
        first: u32,
    ) -> Option<u32> {
        let mut found: Option<u32> = None;
        let mut at = first;
        loop {
            let entered = &mut scratch.entered[at as usize];
            if *entered != scratch.round {
                *entered = scratch.round;
                match self.states[at as usize] {
                    Node::Byte(_) | Node::Bytes { .. } => walks.push((at, start)),
                    Node::Fork(one, other) => {
                        scratch.stack.push(other);
                        at = one;
                        continue;
                    }
                    Node::Look { look, next } => {
                        if is_at_start.satisfies(look) {
                            at = next;
                            continue;
                        }
                    }
                    Node::Match { pattern } => {
                        found = Some(found.map_or(pattern, |other| other.min(pattern)));
                    }
                    Node::Fail => {}
                }
            }
            match scratch.stack.pop() {
                Some(other) => at = other,
                None => return found,
            }
        }
    }
}

impl Range {
    fn takes(self, byte: u8) -> bool {
        self.low <= byte && byte <= self.high
    }
}

impl Scratch {
    /// Makes room for `machine` and marks the states of `state`'s walks.
    fn begin(&mut self, machine: &Machine, state: &RegexState) {
        if self.entered.len() < machine.states.len() {
            self.entered.resize(machine.states.len(), 0);
        }
        self.round += 1;
        for &(at, _) in &state.walks {
            self.entered[at as usize] = self.round;
        }
    }
}

impl RegexState {
    /// How many bytes at the end of the text fed so far an unfinished match may hold.
    pub(crate) fn held_len(&self) -> usize {
        let earliest = self.walks.first();
        earliest.map_or(0, |&(_, start)| self.num_bytes.wrapping_sub(start) as usize)
    }
}

impl IsAtStart {
    /// Other looks are refused when a pattern is compiled.
    fn satisfies(self, look: Look) -> bool {
        match look {
            Look::Start => self == Self::OfText,
            Look::StartLF => self != Self::No,
            _ => false,
        }
    }
}

fn mark(is_first: &mut [bool; 256], ranges: &[Range]) {
    for range in ranges {
        is_first[usize::from(range.low)..=usize::from(range.high)].fill(true);
    }
}

fn range(transition: Transition) -> Range {
    Range {
        low: transition.start,
        high: transition.end,
        next: id(transition.next),
    }
}

fn id(state: StateID) -> u32 {
    state.as_u32()
}

fn to_u32(len: usize) -> u32 {
    u32::try_from(len).expect("the size of an automaton is limited")
}
